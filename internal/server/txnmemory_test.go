package server

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// newTxnMemory is that of a server with so many bytes of --max-inflight-bytes, a quarter of which one transaction may have.
func newTxnMemory(inflight config.Size) *txnMemory {
	c := config.Default()
	c.Limits.InflightBytes, c.Limits.TxnSize = inflight, inflight/4
	m := new(txnMemory)
	m.init(&c)
	return m
}

// grow lets a transaction of a connection have bytes, in steps of a KiB, and returns what it has then.
func grow(m *txnMemory, t *openTxn, bytes int) int {
	for has := int(t.bytes.Load()); has < bytes; has = int(t.bytes.Load()) {
		if m.admit(t, 1024) != nil {
			break
		}
		if _, err := m.resize(t, has+1024); err != nil {
			break
		}
	}
	return int(t.bytes.Load())
}

// TestTransactionsOfAConnectionLeaveRoomToOthers: one connection has half of what transactions share, and one transaction beside it. Others find the
// rest.
func TestTransactionsOfAConnectionLeaveRoomToOthers(t *testing.T) {
	const inflight, each = 64 << 20, 14 << 20
	m := newTxnMemory(inflight)
	open := func(conn *connection) (all []*openTxn, bytes int) {
		for range 10 {
			row := &openTxn{conn: conn, end: func(error, telemetry.AbortReason) { t.Error("a transaction is ended") }}
			all = append(all, row)
			bytes += grow(m, row, each)
		}
		return all, bytes
	}
	greedy := new(connection)
	all, bytes := open(greedy)
	if want := inflight/2 + each; bytes < want-1<<20 || bytes > want {
		t.Errorf("one connection has %d bytes, want %d", bytes, want)
	}
	if !all[2].beside {
		t.Error("the transaction that the share had no room for is not beside it")
	}
	if got := grow(m, &openTxn{conn: new(connection)}, inflight/8); got != inflight/8 {
		t.Errorf("a stranger has %d bytes", got)
	}
	_, _ = open(new(connection))
	if got := m.bytes.Load(); got > inflight+each {
		t.Errorf("all have %d bytes", got)
	}
	if got := grow(m, &openTxn{conn: new(connection)}, inflight/32); got != inflight/32 {
		t.Errorf("a stranger beside two greedy connections has %d bytes", got)
	}
	for _, row := range all {
		m.free(row)
	}
	if n := greedy.owned[ownedTxnBytes].Load(); n != 0 {
		t.Errorf("%d bytes are counted for a connection without transactions", n)
	}
}

// TestOneTransactionIsBesideTheShare, of any size that one may have, whatever the share has. It has room until it ends.
func TestOneTransactionIsBesideTheShare(t *testing.T) {
	const inflight = 64 << 20
	m := newTxnMemory(inflight)
	for m.share(&openTxn{conn: new(connection)}, inflight/32) {
	}
	if used := m.used.Load(); used < inflight*3/4 {
		t.Fatalf("%d bytes of the share are used", used)
	}
	large, other := &openTxn{conn: new(connection)}, &openTxn{conn: new(connection), end: func(error, telemetry.AbortReason) {}}
	if got := grow(m, large, inflight/4); got != inflight/4 || !large.beside {
		t.Fatalf("one beside the share has %d bytes", got)
	}
	var limit *mvcc.LimitError
	if _, err := m.resize(large, inflight/4+1); !errors.As(err, &limit) {
		t.Errorf("one that is too large: %v", err)
	}
	if has := grow(m, other, inflight/4); has == inflight/4 || m.admit(other, inflight/8) != errTxnMemory {
		t.Errorf("another one has %d bytes beside the share", has)
	}
	if _, err := m.resize(large, 0); err != nil || !large.beside {
		t.Errorf("one that gives up what it has written: %v", err)
	}
	m.free(large)
	if got := grow(m, other, inflight/4); got != inflight/4 {
		t.Errorf("after the end of the first another one has %d bytes", got)
	}
}

// TestATransactionBesideTheShareForTooLongEnds, if another one needs the place: once, and as one that was open for too long.
func TestATransactionBesideTheShareForTooLongEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const inflight = 64 << 20
		m := newTxnMemory(inflight)
		var ends []error
		conn := new(connection)
		large := &openTxn{conn: conn, end: func(why error, _ telemetry.AbortReason) { ends = append(ends, why) }}
		other := &openTxn{conn: new(connection)}
		if !m.place(large) {
			t.Fatal("there is no place")
		}
		time.Sleep(m.besideTime)
		if m.place(other) {
			t.Fatal("two are beside the share")
		}
		synctest.Wait()
		if len(ends) > 0 {
			t.Fatalf("it has ended early: %v", ends)
		}
		time.Sleep(time.Millisecond)
		for range 3 {
			if m.place(other) {
				t.Fatal("two are beside the share")
			}
		}
		synctest.Wait()
		var timeout *txnTimeoutError
		if len(ends) != 1 || !errors.As(ends[0], &timeout) || !timeout.beside {
			t.Fatalf("ended %d times: %v", len(ends), ends)
		}
		m.free(large)
		again := &openTxn{conn: conn}
		if m.place(again) {
			t.Error("the connection takes the place again")
		}
		if !m.place(other) {
			t.Error("the place is not free")
		}
		m.free(other)
		time.Sleep(m.besideTime)
		if !m.place(again) {
			t.Error("the connection does not get the place after that")
		}
	})
}

// TestThePlaceBesideTheShareIsKeptForOthers: a client, whose connections give the place to each other, does not get it again while another client wants it,
// and no more does a connection while another one of its client does. If no other wanted it, it is free at once.
func TestThePlaceBesideTheShareIsKeptForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newTxnMemory(64 << 20)
		var clients streamClients
		of := func(client string) *openTxn {
			return &openTxn{conn: &connection{connectionLayers: connectionLayers{streams: clients.enter(client)}}}
		}
		first, second, other := of("many"), of("many"), of("other")
		place := func(txn *openTxn, want bool) {
			t.Helper()
			if m.place(txn) != want {
				t.Fatalf("the place is given: %v", !want)
			}
		}
		leave := func(txn *openTxn) {
			m.free(txn)
			txn.beside = false
		}
		place(first, true)
		leave(first)
		place(first, true) // it was not wanted
		place(second, false)
		leave(first)
		place(first, false)
		place(second, true) // of the same client
		place(other, false)
		leave(second)
		place(first, false)
		place(second, false)
		time.Sleep(min(m.besideTime, keptTime) - time.Millisecond)
		place(other, true)
		leave(other)
		place(first, false)
		time.Sleep(time.Millisecond)
		place(first, true)
	})
}
