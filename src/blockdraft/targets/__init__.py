"""Any Hugging Face model as the decoding loop sees it."""
