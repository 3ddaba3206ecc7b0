"""The link to the datacenter: response times, a circuit breaker and the choice of a transport."""
