package config

import (
	"fmt"
	"net"
	"time"
)

// TLS is the encryption of all listeners, and what they ask of clients.
type TLS struct {
	Cert       string // file of the certificate and its intermediates; empty turns TLS off
	Key        string // file of its key
	ClientCA   string // file of the authorities of client certificates
	ClientAuth ClientAuth
	ClientUser ClientUser
	Min        TLSVersion

	ClientCRL        string        // file of revocation lists of the authorities; empty: none
	MaxConnectionAge time.Duration // from which on a client must connect again; 0: never

	Insecure bool // allows what Validate refuses off loopback
}

// Enabled reports whether the listeners speak TLS.
func (t *TLS) Enabled() bool { return t.Cert != "" }

// ClientAuth is what a listener asks of the client's certificate. It is a flag value.
type ClientAuth string

// What a listener may ask.
const (
	ClientAuthNone    ClientAuth = "none"    // no certificate
	ClientAuthRequest ClientAuth = "request" // if the client sends one, it must be valid
	ClientAuthRequire ClientAuth = "require" // a valid one
)

// ClientUser says which name of a client's certificate is that of its user. It is a flag value; package auth/users has the rules.
type ClientUser string

// The names.
const (
	ClientUserNone ClientUser = "none" // a certificate says that a client may connect, and nothing more
	ClientUserURI  ClientUser = "san-uri"
	ClientUserDNS  ClientUser = "san-dns"
	ClientUserCN   ClientUser = "cn"
)

// TLSVersion is the lowest version of TLS. It is a flag value.
type TLSVersion string

// The versions.
const (
	TLS12 TLSVersion = "1.2"
	TLS13 TLSVersion = "1.3"
)

// connectionAgeMin is the smallest --tls-max-connection-age: a tenth of it is left to requests that are under way.
const connectionAgeMin = time.Minute

// Handshakes at once, and the time of one. Beyond the number the oldest of the network that has most ends.
const (
	HandshakesMax     = 256 // of the gRPC listener
	HandshakesHTTPMax = 32
	HandshakeTimeout  = 5 * time.Second
)

// What TLS takes beside the rest of the bound.
const (
	// handshakeBytes is a handshake whose client has sent as much as it may: 32 KiB of messages in
	// buffers that have doubled, and a goroutine with its stack.
	handshakeBytes = 128 * KiB
	// secureConnectionBytes is the state of a connection: keys, the client's certificate, and a record
	// that is being received, in a buffer that has doubled.
	secureConnectionBytes = 40 * KiB
)

// memory is the part of the bound of resident memory that TLS adds.
func (t *TLS) memory(connections int) Size {
	if !t.Enabled() {
		return 0
	}
	return (HandshakesMax+HandshakesHTTPMax)*handshakeBytes + Size(connections)*secureConnectionBytes
}

func (c *Config) validateTLS(v *validation) {
	t := &c.TLS
	v.check((t.Cert == "") == (t.Key == ""), "tls-cert", "and --tls-key belong together; give both or neither")
	v.check(t.Min == TLS12 || t.Min == TLS13, "tls-min", fmt.Sprintf("is %q; choose 1.2 or 1.3", t.Min))
	switch t.ClientAuth {
	case ClientAuthNone:
		v.check(t.ClientCA == "", "tls-client-ca", "is used by --tls-client-auth request or require only; choose one of them")
	case ClientAuthRequest, ClientAuthRequire:
		v.check(t.Enabled(), "tls-client-auth", fmt.Sprintf("is %s without TLS; give --tls-cert and --tls-key", t.ClientAuth))
		v.check(t.ClientCA != "", "tls-client-auth", fmt.Sprintf("is %s, but there is no authority to check client certificates with; give --tls-client-ca", t.ClientAuth))
	default:
		v.check(false, "tls-client-auth", fmt.Sprintf("is %q; choose none, request or require", t.ClientAuth))
	}
	v.check(t.ClientCRL == "" || t.ClientCA != "", "tls-client-crl", "is used with --tls-client-ca only; give the authorities that have signed the lists")
	v.check(t.MaxConnectionAge == 0 || t.MaxConnectionAge >= connectionAgeMin, "tls-max-connection-age",
		fmt.Sprintf("is %v; give at least %v, or 0 for no limit", t.MaxConnectionAge, connectionAgeMin))
	v.check(t.MaxConnectionAge == 0 || t.Enabled(), "tls-max-connection-age", "is for connections over TLS; give --tls-cert and --tls-key")
	switch t.ClientUser {
	case "", ClientUserNone:
	case ClientUserURI, ClientUserDNS, ClientUserCN:
		v.check(t.ClientAuth != ClientAuthNone, "tls-client-user", fmt.Sprintf("is %s without client certificates; give --tls-client-auth request or require", t.ClientUser))
	default:
		v.check(false, "tls-client-user", fmt.Sprintf("is %q; choose none, san-uri, san-dns or cn", t.ClientUser))
	}
	for _, exposed := range c.Exposed() {
		v.check(t.Insecure || exposed.UsersSuffice, exposed.Option, fmt.Sprintf("%s: other machines can reach this listener, and %s; give --tls-cert, --tls-key, --tls-client-ca and "+
			"--tls-client-auth require (kvctl tls init makes a set for a trial), listen on 127.0.0.1, or accept the risk with --insecure", exposed.Address, exposed.Missing))
	}
}

// Exposed is a listener that other machines can reach, although it does not know its clients.
type Exposed struct {
	Option, Address, Missing string
	UsersSuffice             bool // it is encrypted: it knows its clients if the store has users that are checked
}

// Exposed lists the listeners that need --insecure, or users that are checked, of which the configuration knows nothing.
func (c *Config) Exposed() (all []Exposed) {
	missing, encrypted := "it has neither encryption nor authentication", c.TLS.Enabled()
	if encrypted && c.TLS.ClientAuth == ClientAuthRequire {
		return nil
	}
	if encrypted {
		missing = "it requires no client certificates, so that every client may read and write everything"
	}
	for _, l := range []Exposed{{Option: "listen", Address: c.Listen}, {Option: "http", Address: c.HTTP}} {
		if l.Address != "" && !isLoopback(l.Address) {
			l.Missing, l.UsersSuffice = missing, encrypted
			all = append(all, l)
		}
	}
	return all
}

// isLoopback reports whether an address can be reached from this machine only. For a name other
// than localhost it reports false, and for an address that cannot be parsed true: another check
// refuses it.
func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return true
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
