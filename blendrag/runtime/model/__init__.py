"""What must be known of the model that vLLM loaded, before its keys are moved."""
