// Package client talks to an EpochKV server.
//
// A Client is one connection, safe for use by many goroutines at once. Every call takes a context; a call without a
// deadline gets the client's timeout.
//
//	c, err := client.Dial("127.0.0.1:7400")
//	epoch, err := c.Put(ctx, []byte("k"), []byte("v"))
//	v, err := c.Get(ctx, []byte("k"))
//	for e, err := range c.Scan(ctx, client.Prefix([]byte("user/")), client.ScanOptions{}) { ... }
//
// # Errors and retries
//
// Every failed call returns an error that errors.As turns into an *Error, which has the gRPC code, the stable reason, and what
// the server said besides. The client repeats by itself, within the call's deadline, what is safe to repeat: reads whenever the
// server was unavailable or overloaded; writes only when the server said that it had not executed them, or when the caller
// vouches with Idempotent that executing them twice does no harm. A connection that breaks under a write is therefore an
// error whose OutcomeUnknown is true. Conflicts and failed preconditions are never repeated: the caller has to look again.
//
// # Many small requests
//
// A Pipeline keeps many requests in flight over one stream and is several times faster than calls one by one. Batches are faster
// still for whoever has many keys at hand.
package client
