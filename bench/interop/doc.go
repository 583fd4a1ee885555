// Package interop has the server's transport serve the test service of gRPC's interoperability tests, to the clients of those tests.
// It is in the module of the benchmarks because they need modules that the server does not.
package interop
