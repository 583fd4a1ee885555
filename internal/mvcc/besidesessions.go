package mvcc

import "context"

// besideSessions are the sessions of SessionOf that are in use. All is guarded by the pool's mutex.
type besideSessions struct {
	open    int
	clients map[string]*besideClient // those that have some
}

// besideClient is what one client has of them.
type besideClient struct {
	name     string
	sessions int
}

// ClientTakes is how much of something a client may have for each that it leaves free: three quarters of all, if no other has any.
const ClientTakes = 3

// take counts one more session of a client, whose name is empty for what no client asks for; nil if there is none for it.
func (b *besideSessions) take(limit int, client string) *besideClient {
	c := b.clients[client]
	if c == nil {
		c = &besideClient{name: client}
	}
	has, free := c.sessions+1, limit-b.open-1
	if free < 0 || client != "" && has > 1 && has > ClientTakes*free && limit > ClientTakes {
		return nil
	}
	if b.clients == nil {
		b.clients = map[string]*besideClient{}
	}
	b.clients[client] = c
	c.sessions, b.open = has, b.open+1
	return c
}

func (b *besideSessions) giveBack(c *besideClient) {
	b.open--
	if c.sessions--; c.sessions == 0 {
		delete(b.clients, c.name)
	}
}

type permitKey struct{}

// WithPermit is a context whose sessions of SessionOf have a function for Session.Permit.
func WithPermit(ctx context.Context, permit func() error) context.Context {
	return context.WithValue(ctx, permitKey{}, permit)
}

// SessionOf is Session for a request that may wait and is not bounded otherwise: of a lease, a lock, or a hold. Limits.SessionsBeside
// bounds them, so that they do not take the sessions of all others, and a client, by Options.Owner, leaves some to the other clients. The session
// has the function of WithPermit, if the context has one.
func (s *Store) SessionOf(ctx context.Context) (*Session, error) {
	client := s.clientOf(ctx)
	p := &s.sessions
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.beside.take(s.options.Limits.SessionsBeside, client)
	if c == nil {
		return nil, ErrTooManySessions
	}
	x, err := s.sessionLocked()
	if err != nil {
		p.beside.giveBack(c)
		return nil, err
	}
	x.beside = c
	x.permit, _ = ctx.Value(permitKey{}).(func() error)
	return x, nil
}

// clientOf is the client of a request; empty if they are not told apart, or it is the server's own.
func (s *Store) clientOf(ctx context.Context) string { return s.options.Owner(ctx).Client }
