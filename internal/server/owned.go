package server

import (
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// ownedKind is something of which clients may keep much for long, while they do little: what their connections have of it is counted. The first kinds are
// the bytes of the shares; see ownsBytes.
type ownedKind int

const (
	ownedReads              = ownedKind(shareCount) + iota // sessions of reads that wait; see heldSessions
	ownedWrites                                            // sessions of writes, of a connection those that read first
	ownedWalks                                             // sessions of the walks of watches
	ownedTxns                                              // interactive transactions that are open or begin; see txnTable.reserve
	ownedTxnBytes                                          // what these have of their share; see txnMemory
	ownedLarge                                             // bytes of large messages that are being received, or kept; see receiving
	ownedSmall                                             // of small ones
	ownedReadRequests                                      // small reads while they wait until what they have seen is durable; see ownsRequests
	ownedWriteRequests                                     // small writes until they are durable
	ownedLargeReadRequests                                 // large ones
	ownedLargeWriteRequests                                // the same
	ownedWaiting                                           // bytes of small answers of pipelines; see waitingAnswers
	ownedConnections                                       // that are served
	ownedKinds
)

// owned are the counts of what a connection, and all connections of its client, have of a kind. A client is the network of its address: connections
// have no other identity, and one client may have many. The zero value is of none that is known.
type owned struct{ connection, client *atomic.Int64 }

// add counts n more, and returns how many there are then.
func (o owned) add(n int64) (ofConnection, ofClient int64) {
	ofConnection, ofClient = n, n
	if o.connection != nil {
		ofConnection = o.connection.Add(n)
	}
	if o.client != nil {
		ofClient = o.client.Add(n)
	}
	return ofConnection, ofClient
}

// owns are the connection's counts of a kind.
func (c *connection) owns(k ownedKind) (o owned) {
	if c == nil {
		return o
	}
	o.connection = &c.owned[k]
	if client := c.client(); client != nil {
		o.client = &client.owned[k]
	}
	return o
}

// of are the client's counts of a kind.
func (c *connStreams) of(k ownedKind) owned { return owned{client: &c.client.owned[k]} }

// leaves reports whether enough is left to others after n more were counted. Then the connection has so many, its client so many of all, and so many are
// free. A client leaves a quarter to other clients, if none of them has any. While a client may have at most an eighth of all in addition, each of its
// connections leaves as many to the others as it has: clients may share an address.
func (o owned) leaves(n, has, ofClient, free, all int64) bool {
	if o.client == nil || ofClient <= n || all <= mvcc.ClientTakes {
		return true
	}
	room := mvcc.ClientTakes*free - ofClient // four times what the client may have in addition
	return room >= 0 && ((mvcc.ClientTakes+1)*has <= room || 2*room >= all)
}

// takeOne counts one more if the client leaves enough of all to others, of which so many are free then. The connection has no rule of its own.
func (o owned) takeOne(free, all int64) bool {
	_, ofClient := o.add(1)
	if o.leaves(1, 0, ofClient, free, all) {
		return true
	}
	o.add(-1)
	return false
}

// ownsRequests are the connection's counts of the requests of a share of reads or writes.
func (c *connection) ownsRequests(sh share) owned { return c.owns(ownedReadRequests + ownedKind(sh)) }

// ownsBytes are the connection's counts of the bytes of a share. The client's have no bytes of small requests, because all of these would write one
// counter: writes are counted one by one, and so are reads that wait for a sync; those that wait for the device have sessions. Watches share theirs by a line.
func (c *connection) ownsBytes(sh share) owned {
	own := c.owns(ownedKind(sh))
	if sh == shareSmallReads || sh == shareSmallWrites || sh == shareWatches {
		own.client = nil
	}
	return own
}
