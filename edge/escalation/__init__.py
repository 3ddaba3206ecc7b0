"""The client of the datacenter: transports, the choice between them, and the validation of replies."""
