"""Where a corpus comes from: prompts, the target's own answers, the folder that keeps them."""
