"""What the `daric-rag` command and the demo are made of: one file per command."""
