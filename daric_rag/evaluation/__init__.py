"""How good answers are with reuse: measured on your model and your documents."""
