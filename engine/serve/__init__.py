"""The program `python -m engine.serve`: an OpenAI-compatible server over one model.

cli.py       flags, start and end
app.py       routes, and what every request must pass: key, host, size
facts.py     what clients ask first: the model, its context, its tokenizer
fields.py    a request's fields, checked one by one
values.py    single values of them
tools.py     tools and the turns in which they were called
calls.py     tool calls in what a model writes
thoughts.py  what it thinks before it answers
variables.py what a request tells the chat template beside its messages
formats.py   response_format, and a call that must come
prompts.py   messages to token ids, a user's special tokens as text
worker.py    what the thread that owns the model (engine/batch/worker.py) does for HTTP
answers.py   thoughts, text and calls of an answer that is being written
replies.py   what clients of chat/completions and completions get back
streaming.py the events of a stream
anthropic.py, anthropic_reply.py    /v1/messages
responses.py, responses_reply.py    /v1/responses
evidence.py  what an answer read, and whether full attention would have said the same
page.py, page.html    the page for people
metrics.py   counters for Prometheus
"""
