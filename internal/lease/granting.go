package lease

import "context"

// granting are the leases whose grants have begun to commit. A commit waits after it is visible, if there is too much to write, and the lease is in memory
// only after that: meanwhile nothing else must tell that the lease exists, because it cannot be used, and its record enters no other entry. Guarded by Manager.mu.
type granting map[ID]*grantUnderWay

type grantUnderWay struct {
	lease *entry
	ended chan struct{} // closed when the lease is in memory, or is not granted
}

// beginGrant notes a grant, under the latch of the lease's record. A commit may begin several times.
func (m *Manager) beginGrant(e *entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g := m.granting[e.id]; g == nil || g.lease != e { // else one that has failed, and is about to say so, has noted its own
		m.granting[e.id] = &grantUnderWay{lease: e, ended: make(chan struct{})}
		if g != nil {
			close(g.ended)
		}
	}
}

func (m *Manager) endGrant(e *entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.endGrantLocked(e)
}

// endGrantLocked does nothing if the grant was not noted, or another one has been since.
func (m *Manager) endGrantLocked(e *entry) {
	if g := m.granting[e.id]; g != nil && g.lease == e {
		close(g.ended)
		delete(m.granting, e.id)
	}
}

// awaitEntered waits until a lease whose record is there is in memory as well, if its grant is under way.
func (m *Manager) awaitEntered(ctx context.Context, id ID) error {
	m.mu.RLock()
	g := m.granting[id]
	m.mu.RUnlock()
	if g == nil {
		return nil
	}
	select {
	case <-g.ended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
