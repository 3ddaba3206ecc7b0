"""Commands about models: the zoo's, and the user's own."""
