package objectstore

import (
	"cmp"
	"context"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// credentialsTimeout bounds how long a service, or a program of the file of credentials, may take to give credentials out: less than
// --close-timeout.
const credentialsTimeout = 10 * time.Second

// boundedProvider asks for credentials for a bounded time, and not for as long as a service or a program (credential_process) likes: the library
// asks on behalf of all requests, and holds a lock in which other requests wait, whatever their contexts say. It tells a service that the time
// is over. A program, to which the library gives no end, is left to itself, and the next question waits for it.
type boundedProvider struct {
	credentials.Expiry // of what was given out; the library's lock guards it
	inner              credentials.Provider
	most               time.Duration

	asking chan struct{} // has room for the one question that inner is asked, which may take longer
}

func newBoundedProvider(inner credentials.Provider, most time.Duration) *boundedProvider {
	return &boundedProvider{inner: inner, most: most, asking: make(chan struct{}, 1)}
}

// given is an answer.
type given struct {
	value credentials.Value
	err   error
}

// RetrieveWithCredContext implements credentials.Provider.
func (p *boundedProvider) RetrieveWithCredContext(asked *credentials.CredContext) (credentials.Value, error) {
	var bounded credentials.CredContext
	if asked != nil {
		bounded = *asked
	}
	ctx, cancel := context.WithTimeout(cmp.Or(bounded.Context, context.Background()), p.most)
	defer cancel()
	bounded.Context = ctx
	select {
	case p.asking <- struct{}{}:
	case <-ctx.Done():
		return credentials.Value{}, context.Cause(ctx)
	}
	answer := make(chan given, 1)
	go func() {
		defer func() { <-p.asking }()
		value, err := p.inner.RetrieveWithCredContext(&bounded)
		answer <- given{value, err}
	}()
	select {
	case g := <-answer:
		if g.err == nil {
			p.SetExpiration(g.value.Expiration, credentials.DefaultExpiryWindow)
		}
		return g.value, g.err
	case <-ctx.Done():
		return credentials.Value{}, context.Cause(ctx)
	}
}

// Retrieve implements credentials.Provider.
func (p *boundedProvider) Retrieve() (credentials.Value, error) {
	return p.RetrieveWithCredContext(nil)
}
