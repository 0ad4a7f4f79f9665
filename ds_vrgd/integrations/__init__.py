"""Where users already are: thin layers over other people's training loops. Nothing is imported until it is used."""
