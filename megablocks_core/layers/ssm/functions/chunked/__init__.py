"""Linear recurrences computed a chunk of tokens at a time, whatever their state is."""
