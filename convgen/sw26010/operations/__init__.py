"""What layers between convolutions do in a training step: a printed program and a closed form of its events each."""
