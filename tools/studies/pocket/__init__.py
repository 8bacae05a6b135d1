"""How the shipped model (weights/pocket) is made: `python -m tools.studies.pocket.train`.

model.py       the architecture while it trains
start.py       the first weights: an induction circuit
data.py        training rows
tokenizer.py   the tokenizer and the chat template
optim.py       Muon
schedule.py    stages and machines
run.py         a training run
checkpoint.py  the folder in Hugging Face layout
filters.py     filter layers by brute force over the tasks
"""
