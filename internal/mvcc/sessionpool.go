package mvcc

import "sync"

// sessionPool is the pool of a store's sessions, and its limit. The session that was closed last is taken first: its
// buffers are the ones most likely to be in the processor's cache.
type sessionPool struct {
	kept keptBytes

	mu     sync.Mutex
	idle   []*Session
	open   int            // in use; the limit counts them
	beside besideSessions // of these, those of SessionOf, which have a limit of their own
	closed bool           // the store closes: no session is given out any more
}

// attachedMax is how many idle sessions keep their attachments. More sessions than this at once are a burst, whose
// buffers would stay in memory after it.
const attachedMax = 256

// Session takes a session from the pool. The caller closes it. The error is ErrTooManySessions or ErrClosed.
func (s *Store) Session() (*Session, error) {
	s.sessions.mu.Lock()
	defer s.sessions.mu.Unlock()
	return s.sessionLocked()
}

func (s *Store) sessionLocked() (*Session, error) {
	p := &s.sessions
	if p.closed {
		return nil, ErrClosed
	}
	if n := len(p.idle); n > 0 {
		x := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.open++
		x.closed.Store(false)
		return x, nil
	}
	if p.open >= s.options.Limits.Sessions {
		return nil, ErrTooManySessions
	}
	p.open++
	return s.newSession(), nil
}

// OwnSession makes a session for work of the server's own, which must go on while clients have all sessions in use: the
// limit does not count it. It is never closed, and lives as long as the store.
func (s *Store) OwnSession() *Session { return s.newSession() }

// put takes a session back.
func (p *sessionPool) put(x *Session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open--
	if x.beside != nil {
		p.beside.giveBack(x.beside)
		x.beside = nil
	}
	if len(p.idle) >= attachedMax {
		x.Attachment = nil
	}
	p.idle = append(p.idle, x)
}

// close refuses new sessions, and reports false if that was done before.
func (p *sessionPool) close() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := !p.closed
	p.closed = true
	return first
}

// Sessions are how many sessions are in use, and how many there are with the idle ones.
func (s *Store) Sessions() (open, all int) {
	p := &s.sessions
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open, p.open + len(p.idle)
}
