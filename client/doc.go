// Package client talks to an EpochKV server.
//
// A Client is one connection, safe for use by many goroutines at once. Every call takes a context;
// a call without a deadline gets the client's timeout.
//
//	c, err := client.Dial("127.0.0.1:7400")
//	epoch, err := c.Put(ctx, []byte("k"), []byte("v"))
//	v, err := c.Get(ctx, []byte("k"))
//	for e, err := range c.Scan(ctx, client.Prefix([]byte("user/")), client.ScanOptions{}) { ... }
//
// # Errors and retries
//
// Every failed call returns an error that errors.As turns into an *Error, which has the gRPC code,
// the stable reason, and the server's metadata. The client repeats calls within their deadline if
// that is safe: reads whenever the server was unavailable or overloaded, and writes as well, because
// each has a RequestID, with which the server executes it at most once. If the deadline passes before
// an answer comes, the error's OutcomeUnknown is true. Conflicts and failed preconditions are never
// repeated: the caller has to read again.
//
// # Many small requests
//
// A Pipeline keeps many requests in flight over one stream and is several times as fast as calls
// one by one. Batches are faster still if many keys are at hand.
//
// # Traces
//
// Package client/tracing has an option with which calls are spans of OpenTelemetry, and the server's spans are under them.
package client
