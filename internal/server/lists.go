package server

import (
	"context"
	"fmt"
	"runtime"

	"google.golang.org/protobuf/proto"
)

// Requests for leases, locks, users and the server itself are not admitted: a lease must be kept alive, and an operator served, in overload,
// too. What bounds their answers is here.
//
//	message ─► turn, if the answer is a list ─► execute ─► charge the answer ─► give the turn back ─► transport ─► release the charge
//
// So of the lists, as many are made at once as there are turns, and those that wait for their clients are counted with all other answers. A
// list for which there is no room is refused, and so is the answer to a keep-alive, after the leases were kept alive. The other answers
// are counted, and not refused: that to a change, and what an operator needs in overload, which is small.
type lists struct{ turns [listKinds]chan struct{} }

// listKind says where a list comes from.
type listKind uint8

const (
	notListed  listKind = iota // not a list
	listMemory                 // made of what is in memory, in less than a second
	listUsers                  // of users, roles and tokens, of which there are very many, and which any user may ask for
	listLeases                 // of all leases, of which there may be a million
	listLocks                  // of locks, of which there may be very many, and which any user may ask for
	listStored                 // made of what is in the store: it may wait for the device
	listTarget                 // of backups in a target; its turns are those of targetWork
	listKinds
)

// listTurns are how many lists of each kind are made at once (of users, leases and locks: see init): a few MiB each, but for the watches of a server that has very many.
var listTurns = [listKinds]int{listMemory: 4, listStored: 32}

func (l *lists) init() {
	for kind := range l.turns {
		l.turns[kind] = make(chan struct{}, listTurns[kind])
	}
	for _, kind := range []listKind{listUsers, listLeases, listLocks} { // what all of a kind compute leaves processors to others
		l.turns[kind] = make(chan struct{}, max(runtime.GOMAXPROCS(0)/2, 1))
	}
}

// enter waits for a turn, if the method makes a list. After nil the caller calls leave.
func (l *lists) enter(ctx context.Context, row *rpcRow) (leave func(), err error) {
	if row == nil || row.lists == notListed || row.lists == listTarget {
		return func() {}, nil
	}
	turns := l.turns[row.lists]
	select {
	case turns <- struct{}{}:
		return func() { <-turns }, nil
	case <-ctx.Done():
		return func() {}, context.Cause(ctx)
	}
}

// countAnswer counts the answer to a request that was not admitted, until it has been sent. A list may be refused instead.
func (s *Server) countAnswer(ctx context.Context, row *rpcRow, out any, err error) (any, error) {
	m := encoderOf(out)
	if _, counted := out.(*chargedMessage); err != nil || m == nil || counted || row == nil { // those of admitted requests are counted, or small
		return out, err
	}
	size := m.SizeVT()
	if size < countedBytesMin {
		return out, nil
	}
	held, err := s.admission.charge(connectionOf(ctx), size, row.lists == notListed)
	switch {
	case err != nil:
		return nil, statusOf(err).Err()
	case held == nil:
		return out, nil
	}
	return held.of(m), nil
}

// encoderOf is how an answer encodes itself; nil if it is no message.
func encoderOf(out any) encoder {
	switch m := out.(type) {
	case encoder:
		return m
	case proto.Message:
		return reflected{m}
	}
	return nil
}

// reflected is a message for which no encoder was generated.
type reflected struct{ proto.Message }

// SizeVT implements encoder.
func (m reflected) SizeVT() int { return proto.Size(m.Message) }

// MarshalToSizedBufferVT implements encoder.
func (m reflected) MarshalToSizedBufferVT(b []byte) (int, error) {
	encoded, err := proto.MarshalOptions{}.MarshalAppend(b[:0], m.Message)
	if err == nil && len(encoded) != len(b) {
		err = fmt.Errorf("a message of %d bytes is encoded in %d", len(b), len(encoded))
	}
	return len(encoded), err
}
