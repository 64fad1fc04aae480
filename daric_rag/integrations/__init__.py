"""LangChain and LlamaIndex objects over `DaricEngine`; each module needs its own extra."""
