package server

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// txnMemory bounds what open interactive transactions hold together.
//
// They share shared.bytes. A connection gets of it what leaves enough to others, and so does a client: see admissionLimit.leaves and owned.leaves. One
// transaction at a time may be beside the share: the first that needs more than its connection may have. So one of any size up to --max-txn-size finds
// room whatever the share has, and of several that grow at once one gets through, while the others are refused before they have much. One that was beside
// the share for a quarter of --txn-timeout is rolled back when another one needs the place. Whatever ended it, the place is kept for others for a
// while if one of them was refused meanwhile: its client does not get the place again, or its connection if all of them are of its client.
type txnMemory struct {
	// Constant after Open.
	shared     admissionLimit
	sizeMax    int           // from which on one is too large
	besideMax  int64         // of the one beside the share, until its client rolls back what was too large
	besideTime time.Duration // for which one may be beside the share while another one needs the place

	bytes atomic.Int64 // of all
	used  atomic.Int64 // of the share

	mu     sync.Mutex // a leaf
	beside *openTxn
	since  time.Time
	wanted bool        // one of another connection was refused the place since beside has it
	other  bool        // it was one of another client
	had    *connection // of the transaction that had the place, until when the place is kept for others
	client *streamClient
	until  time.Time
}

// keptTime is for how long the place is kept for others: one that was refused may have to read and write again all that it had.
const keptTime = 10 * time.Second

func (m *txnMemory) init(c *config.Config) {
	m.shared.bytes, m.sizeMax = uint64(c.Inflight()), int(c.TxnSize())
	m.besideMax, m.besideTime = int64(c.Inflight()), c.TxnTimeout/besideParts
}

// besideParts is how many transactions may be beside the share one after the other, for as long as they can, before one that waits has been open for
// too long.
const besideParts = 4

// fits reports whether the share has room for more of t.
func (m *txnMemory) fits(t *openTxn, used, more int64) bool {
	own, all := t.conn.owns(ownedTxnBytes), int64(m.shared.bytes)
	has, client := own.add(0)
	free := all - used - more
	return free >= 0 && m.shared.leaves(has+more, uint64(used+more)) && own.leaves(more, has+more, client+more, free, all)
}

// share counts more bytes of t in the share, if they fit.
func (m *txnMemory) share(t *openTxn, more int64) bool {
	for {
		used := m.used.Load()
		if more > 0 && !m.fits(t, used, more) {
			return false
		}
		if m.used.CompareAndSwap(used, used+more) {
			t.conn.owns(ownedTxnBytes).add(more)
			return true
		}
	}
}

// place makes t the transaction beside the share, unless another one is. The mutex of the stream of t is held.
func (m *txnMemory) place(t *openTxn) bool {
	if t.beside {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.keptLocked(t.conn) {
		return false
	}
	if other := m.beside; other != nil {
		m.wanted, m.other = m.wanted || t.conn != other.conn, m.other || t.conn.client() != other.conn.client()
		if time.Since(m.since) > m.besideTime {
			m.since = time.Now() // one end is enough
			go other.end(&txnTimeoutError{beside: true, limit: m.besideTime}, telemetry.AbortTimeout)
		}
		return false
	}
	m.beside, m.since, m.wanted, m.other, t.beside = t, time.Now(), false, false, true
	m.share(t, -t.bytes.Load())
	return true
}

// keptLocked reports whether the place is kept for others than a connection.
func (m *txnMemory) keptLocked(conn *connection) bool {
	mine := conn != nil && conn == m.had || m.client != nil && conn.client() == m.client
	return mine && time.Now().Before(m.until)
}

// leaveLocked frees the place, and keeps it for those that wanted it.
func (m *txnMemory) leaveLocked() {
	if m.wanted {
		m.had, m.client, m.until = m.beside.conn, nil, time.Now().Add(min(m.besideTime, keptTime))
		if m.other {
			m.client = m.had.client()
		}
	}
	m.beside = nil
}

// admit refuses a request of which a transaction keeps so many bytes, if it may not have as many or there is no room for them.
func (m *txnMemory) admit(t *openTxn, size int) error {
	switch {
	case size > m.sizeMax:
		return &mvcc.LimitError{What: "transaction bytes", Limit: m.sizeMax, Got: size}
	case t.beside && t.bytes.Load()+int64(size) > m.besideMax:
		return &mvcc.LimitError{What: "transaction bytes", Limit: m.sizeMax, Got: int(t.bytes.Load()) + size}
	case !t.beside && !m.fits(t, m.used.Load(), int64(size)) && !m.place(t):
		return errTxnMemory
	}
	return nil
}

// resize records the memory of t in bytes. The error means that t alone, or all transactions together, use too much. What t alone has too much stays
// until its client rolls back. If there is no room for what t has more than before, that is not recorded, and t has to give up everything.
func (m *txnMemory) resize(t *openTxn, size int) (recorded bool, err error) {
	more := int64(size) - t.bytes.Load()
	switch {
	case !t.beside && m.share(t, more):
	case more > 0 && (!m.place(t) || int64(size) > m.besideMax):
		err = errTxnMemory
	}
	if recorded = err == nil; recorded {
		t.bytes.Add(more)
		m.bytes.Add(more)
	}
	if size > m.sizeMax {
		err = &mvcc.LimitError{What: "transaction bytes", Limit: m.sizeMax, Got: size}
	}
	return recorded, err
}

// free counts nothing of t any more.
func (m *txnMemory) free(t *openTxn) {
	has := t.bytes.Swap(0)
	m.bytes.Add(-has)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.beside == t {
		m.leaveLocked()
	} else {
		m.share(t, -has)
	}
}
