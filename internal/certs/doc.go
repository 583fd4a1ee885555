// Package certs keeps the TLS configuration of the server's listeners: it reads certificate, key and
// client authorities from files, checks them, and replaces all of them at once when they change.
//
// Terms. A source is the files of one configuration and the state that was loaded from them last. A
// stamp is what the file system says about a file without reading it: modification time, size and
// inode. An authority signs certificates for a trial or a test.
//
// Invariants. A state is immutable, and a handshake uses one state: certificate and client
// authorities are never of two different loads. A state has passed every check when it was loaded:
// the key fits the certificate, each certificate is signed by the next one, none has expired, and
// every block of every file was understood. If a load fails, the last state stays.
//
// The package opens no socket and knows neither HTTP/2 nor gRPC.
package certs
