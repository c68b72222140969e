"""An island: the processes of one machine that train one copy of the model, and θ as flat vectors."""
