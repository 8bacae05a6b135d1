"""An LLM for programs on asyncio: any number of callers await answers, which share decode steps."""
