"""Engine of portable sandbox checkpoints."""
