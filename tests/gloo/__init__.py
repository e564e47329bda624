"""Real ranks over gloo. A package, so that its modules' names are its own and workers can import them."""
