package server

import (
	"net"
	"testing"

	"github.com/epochkv/epochkv/internal/telemetry"
)

// ownClients takes from what all clients share, with so many connections of one client after another, until no connection gets more. Each client gets
// three quarters of what the one before it left. Then all of it is given back.
func ownClients(t *testing.T, all, each int64, take func(*connection) bool, give func(*connection)) {
	t.Helper()
	var clients streamClients
	var taken []*connection
	left := all
	for _, name := range []string{"first", "second", "third"} {
		var got int64
		conns := make([]*connection, 100)
		for i := range conns {
			conns[i] = &connection{connectionLayers: connectionLayers{streams: clients.enter(name)}}
		}
		for again := true; again; {
			again = false
			for _, conn := range conns {
				if take(conn) {
					again, got, taken = true, got+each, append(taken, conn)
				}
			}
		}
		if most, least := left*3/4+1, left*3/4-left/50-2*each; got < least || got > most {
			t.Errorf("the %s client has %d of %d", name, got, left)
		}
		left -= got
	}
	for _, conn := range taken {
		give(conn)
	}
	for _, conn := range taken {
		for k := range ownedKinds {
			if own := conn.owns(k); own.connection.Load() != 0 || own.client.Load() != 0 {
				t.Fatalf("kind %d: a connection has %d, its client %d of what was given back", k, own.connection.Load(), own.client.Load())
			}
		}
	}
}

// TestOneClientLeavesAQuarter of what all clients share, and the next one a quarter of the rest, however many connections they have. By connection alone,
// one with many of them left nothing.
func TestOneClientLeavesAQuarter(t *testing.T) {
	t.Run("transactions", func(t *testing.T) {
		b := txnTable{countMax: 1024, open: map[uint64]*openTxn{}}
		ownClients(t, 1024, 1, func(c *connection) bool { return b.reserve(c) == nil }, b.cancel)
	})
	t.Run("bytes of transactions", func(t *testing.T) {
		m := newTxnMemory(64 << 20)
		ownClients(t, 64<<20, 1<<10, func(c *connection) bool { return m.share(&openTxn{conn: c}, 1<<10) },
			func(c *connection) { m.share(&openTxn{conn: c}, -1<<10) })
	})
	t.Run("scans", func(t *testing.T) {
		var a admission
		a.init(8192, 256<<20)
		each := a.scanBytesMin()
		ownClients(t, int64(scansMax(8192)), 1, func(c *connection) bool { return a.enter(c, shareScans, each) },
			func(c *connection) { a.leave(c, shareScans, each) })
	})
	for sh, name := range map[share]string{shareLargeReads: "large reads", shareLargeWrites: "large writes", shareMessages: "messages"} {
		t.Run(name, func(t *testing.T) {
			const each = 20 << 10
			var a admission
			a.init(8192, 256<<20)
			ownClients(t, int64(a.words[sh].limit.bytes), each, func(c *connection) bool { return a.add(c, sh, admissionOne+each, each) },
				func(c *connection) { a.leaveShare(c, sh, each) })
		})
	}
	for kind, share := range map[ownedKind]func(*heldSessions) *sessionShare{
		ownedReads:  func(h *heldSessions) *sessionShare { return &h.reads },
		ownedWalks:  func(h *heldSessions) *sessionShare { return &h.walks },
		ownedWrites: func(h *heldSessions) *sessionShare { return &h.writes },
	} {
		t.Run(map[ownedKind]string{ownedReads: "reads that wait", ownedWalks: "walks", ownedWrites: "writes"}[kind], func(t *testing.T) {
			var h heldSessions
			h.init(8192)
			s := share(&h)
			own := func(c *connection) (own owned) {
				if own = c.owns(kind); kind == ownedWrites {
					own.connection = nil // as that of one that need not read
				}
				return own
			}
			ownClients(t, s.max, 1, func(c *connection) bool { return s.hold(own(c), 1) }, func(c *connection) { s.release(own(c), 1) })
		})
	}
	for sh, name := range map[share]string{shareSmallReads: "small reads", shareSmallWrites: "small writes", shareLargeReads: "many large reads", shareLargeWrites: "many large writes"} {
		t.Run(name+" that wait for a sync", func(t *testing.T) {
			const each, left = 17_000, 390 // what it still takes while it waits
			var a admission
			a.init(8192, 256<<20)
			ownClients(t, 8192, 1, func(c *connection) bool {
				if !a.enter(c, sh, each) {
					return false
				}
				if a.beginWait(c, sh) != nil {
					a.leave(c, sh, each)
					return false
				}
				a.shrink(c, sh, each, left)
				return true
			}, func(c *connection) {
				a.endWait(c, sh)
				a.leave(c, sh, left)
			})
		})
	}
	t.Run("bytes of answers", func(t *testing.T) {
		var a admission
		a.init(8192, 256<<20)
		ownClients(t, int64(a.words[shareAnswers].limit.bytes), 16<<10, func(c *connection) bool { return c.charge(&a, 16<<10, false) },
			func(c *connection) { c.releaseCharge(&chargedBytes{admission: &a, conn: c, bytes: 16 << 10}) })
	})
	for kind, name := range map[ownedKind]string{ownedLarge: "large messages", ownedSmall: "small messages"} {
		t.Run(name, func(t *testing.T) {
			const each = 20 << 10
			r, has := newReceiving(64<<20), map[*connection]*int64{}
			s := map[ownedKind]*receivingShare{ownedLarge: &r.large, ownedSmall: &r.small}[kind]
			ownClients(t, s.limit, each, func(c *connection) bool {
				if has[c] == nil {
					has[c] = new(int64)
				}
				return s.add(has[c], c.streams.of(kind), each)
			}, func(c *connection) { s.release(has[c], c.streams.of(kind), each) })
		})
	}
}

// TestOneClientLeavesConnections to others, which are served at once; those beyond are told so, and many more are closed. One that was refused is served
// when its client has fewer.
func TestOneClientLeavesConnections(t *testing.T) {
	c := connections{max: 1000, requests: new(telemetry.Requests), receiving: newReceiving(0), admission: new(admission)}
	from := func(address string) *connection { return c.admit(&net.TCPAddr{IP: net.ParseIP(address), Port: 1}) }
	var all []*connection
	for len(all) < 750+refusedConnectionsMax {
		conn := from("192.0.2.1")
		if conn == nil || conn.refused.Load() != (len(all) >= 750) {
			t.Fatalf("connection %d: %+v", len(all), conn)
		}
		all = append(all, conn)
	}
	if from("192.0.2.1") != nil {
		t.Error("one more is open")
	}
	if conn := from("192.0.2.2"); conn == nil || c.refuses(conn) {
		t.Error("one of another client is not served")
	} else {
		c.release(conn)
	}
	last := all[len(all)-1]
	if !c.refuses(last) {
		t.Error("one that was refused is served meanwhile")
	}
	c.release(all[0])
	if c.refuses(last) {
		t.Error("one that was refused is not served though its client has one less")
	}
	for _, conn := range all[2:] {
		c.release(conn)
	}
	all = all[1:2]
	for _, client := range []struct {
		address string
		most    int // that are served
	}{{"192.0.2.2", 749}, {"192.0.2.1", 187}} {
		served := 0
		for range 1000 {
			if conn := from(client.address); conn != nil {
				all = append(all, conn)
				if !conn.refused.Load() {
					served++
				}
			}
		}
		if served < client.most-2 || served > client.most {
			t.Errorf("%d of %s are served, not %d", served, client.address, client.most)
		}
	}
	for _, conn := range all {
		c.release(conn)
	}
	if c.open.Load() != 0 || c.served.Load() != 0 || c.beyond.Load() != 0 || len(c.receiving.clients.all) != 0 {
		t.Errorf("%d are open, %d served, %d beyond", c.open.Load(), c.served.Load(), c.beyond.Load())
	}
}

// TestClaimsToLargeSlotsAreThoseOfAClient: clients have these slots in turn.
func TestClaimsToLargeSlotsAreThoseOfAClient(t *testing.T) {
	c := connections{max: 2, requests: new(telemetry.Requests), receiving: newReceiving(0), admission: new(admission)}
	conn := c.admit(&net.TCPAddr{IP: net.ParseIP("192.0.2.1"), Port: 1})
	defer c.release(conn)
	in := newInbound(c.receiving, conn.streams)
	for i, claim := range append(conn.claims[:], conn.commits.claim, in.claim) {
		if claim.client != conn.client() || claim.client == nil {
			t.Errorf("claim %d is that of %v", i, claim.client)
		}
	}
}

// TestConnectionsOfAClientLeaveTransactionsToEachOther: clients may share an address.
func TestConnectionsOfAClientLeaveTransactionsToEachOther(t *testing.T) {
	var clients streamClients
	b := txnTable{countMax: 1024, open: map[uint64]*openTxn{}}
	for i, want := range []int{640, 64, 32, 16} {
		conn := &connection{connectionLayers: connectionLayers{streams: clients.enter("client")}}
		got := 0
		for b.reserve(conn) == nil {
			got++
		}
		if got != want {
			t.Errorf("connection %d has %d transactions, want %d", i, got, want)
		}
	}
}
