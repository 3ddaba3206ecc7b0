"""The settings of the servers: where they are declared, read, checked and described."""
