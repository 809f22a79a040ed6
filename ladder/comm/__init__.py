"""Communication between the GPUs of one host: peer memory, barriers, transports."""
