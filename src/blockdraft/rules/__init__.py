"""What a round is made of, without a model in sight: candidates, laws, acceptance, and how many candidates are worth it."""
