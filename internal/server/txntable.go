package server

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// txnTable has the open interactive transactions, bounds them, and counts how all transactions end.
type txnTable struct {
	// Constant after Open.
	countMax int
	idle     time.Duration // how long one may wait for its next request
	total    time.Duration // how long one may be open

	memory    txnMemory
	started   atomic.Uint64
	committed atomic.Uint64
	aborted   [telemetry.AbortReasons]atomic.Uint64

	mu       sync.Mutex // a leaf
	open     map[uint64]*openTxn
	reserved int // transactions that begin
}

func (b *txnTable) init(c *config.Config) {
	b.memory.init(c)
	b.countMax, b.idle, b.total = c.Limits.Transactions, c.TxnIdleTimeout, c.TxnTimeout
	b.open = map[uint64]*openTxn{}
}

// openTxn is an entry of the table.
type openTxn struct {
	// Constant while it is in the table.
	id         uint64
	conn       *connection // nil: none, in a test
	peer       string
	isolation  pb.Isolation
	readOnly   bool
	durability mvcc.Durability
	at         keys.Epoch
	begun      time.Time
	end        func(error, telemetry.AbortReason) // rolls the transaction back from outside; called without the table's lock
	ctx        context.Context                    // of its reads: of the stream, and ended by stop
	limiter    *auth.Limiter                      // of its user, which counts it; nil: none
	stop       context.CancelCauseFunc            // before the transactionStream's mutex is taken, which a long walk holds

	beside    bool // the share of transactions; the mutex of its stream guards it
	requests  atomic.Uint64
	bytes     atomic.Int64
	busy      atomic.Bool
	idleSince atomic.Int64 // nanoseconds of the server's clock
}

// keepsReads reports whether the transaction keeps what it reads, until its commit compares that.
func (t *openTxn) keepsReads() bool {
	return !t.readOnly && t.isolation == pb.Isolation_ISOLATION_SERIALIZABLE
}

// reserve reserves an entry before a transaction of a connection takes its session. The caller calls enter or cancel. The last eighth of the entries is
// for connections that have fewer than are free, so that no connection has all, and a client leaves a quarter to others.
func (b *txnTable) reserve(conn *connection) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	free := b.countMax - len(b.open) - b.reserved
	own := conn.owns(ownedTxns)
	has, client := own.add(1)
	if free <= 0 || free <= b.countMax/8 && has > int64(free) || !own.leaves(1, has, client, int64(free)-1, int64(b.countMax)) {
		own.add(-1)
		return errTooManyTxns
	}
	b.reserved++
	return nil
}

func (b *txnTable) cancel(conn *connection) {
	b.mu.Lock()
	b.reserved--
	b.mu.Unlock()
	conn.owns(ownedTxns).add(-1)
}

// enter adds t to the table, in a reserved entry.
func (b *txnTable) enter(t *openTxn) {
	b.mu.Lock()
	b.reserved--
	b.open[t.id] = t
	b.mu.Unlock()
	b.started.Add(1)
}

func (b *txnTable) leave(t *openTxn) {
	b.mu.Lock()
	delete(b.open, t.id)
	b.mu.Unlock()
	t.conn.owns(ownedTxns).add(-1)
	b.memory.free(t)
}

func (b *txnTable) find(id uint64) *openTxn {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open[id]
}

// list returns the transactions in the table, oldest first.
func (b *txnTable) list() []*openTxn {
	b.mu.Lock()
	all := make([]*openTxn, 0, len(b.open))
	for _, t := range b.open {
		all = append(all, t)
	}
	b.mu.Unlock()
	slices.SortFunc(all, func(x, y *openTxn) int { return cmp.Compare(x.id, y.id) })
	return all
}

func (b *txnTable) stats() telemetry.TransactionStats {
	s := telemetry.TransactionStats{Bytes: b.memory.bytes.Load(), Started: b.started.Load(), Committed: b.committed.Load()}
	for i := range b.aborted {
		s.Aborted[i] = b.aborted[i].Load()
	}
	all := b.list()
	if s.Open = len(all); s.Open > 0 {
		s.OldestAge = time.Since(all[0].begun)
	}
	return s
}

// ListTransactions implements Admin.
func (s *adminService) ListTransactions(ctx context.Context, _ *pb.ListTransactionsRequest) (*pb.ListTransactionsResponse, error) {
	list := s.transactions.list()
	if err := s.checkAgain(ctx); err != nil { // it may have waited for its turn
		return nil, statusOf(err).Err()
	}
	out := new(pb.ListTransactionsResponse)
	for _, t := range list {
		info := &pb.TransactionInfo{
			Id: t.id, Peer: t.peer, Isolation: t.isolation, ReadOnly: t.readOnly, ReadEpoch: uint64(t.at),
			Age: durationpb.New(time.Since(t.begun)), Requests: t.requests.Load(), Bytes: uint64(t.bytes.Load()),
		}
		if !t.busy.Load() {
			info.Idle = durationpb.New(max(0, s.clock.now()-time.Duration(t.idleSince.Load())))
		}
		out.Transactions = append(out.Transactions, info)
	}
	return out, nil
}

// EndTransaction implements Admin.
func (s *adminService) EndTransaction(_ context.Context, req *pb.EndTransactionRequest) (*pb.EndTransactionResponse, error) {
	t := s.transactions.find(req.Id)
	if t == nil {
		return nil, statusOf(errNoSuchTxn).Err()
	}
	s.endTransaction(t)
	return new(pb.EndTransactionResponse), nil
}

func (s *adminService) endTransaction(t *openTxn) {
	s.log.Info("an operator ends a transaction", "id", t.id, "peer", t.peer, "age", time.Since(t.begun))
	t.end(errTxnEnded, telemetry.AbortOperator)
}
