package client

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TxnOption changes a transaction.
type TxnOption func(*kvpb.BeginRequest)

// SnapshotIsolation reads at one snapshot and lets the first committer of a key win. Unlike the
// default, which is serializable, it permits write skew, and conflicts less.
func SnapshotIsolation() TxnOption {
	return func(b *kvpb.BeginRequest) { b.Isolation = kvpb.Isolation_ISOLATION_SNAPSHOT }
}

// ReadOnly refuses writes. A transaction that writes nothing never conflicts.
func ReadOnly() TxnOption { return func(b *kvpb.BeginRequest) { b.ReadOnly = true } }

// ReadAt makes the transaction read-only, and reads at epoch e. It fails with ErrSnapshotGone if e
// is not readable any more.
func ReadAt(e Epoch) TxnOption {
	return func(b *kvpb.BeginRequest) { b.ReadOnly, b.SnapshotEpoch = true, uint64(e) }
}

// ReadAtTime makes the transaction read-only, and reads the state at a time of the past, by the server's clock.
func ReadAtTime(t time.Time) TxnOption {
	return func(b *kvpb.BeginRequest) { b.ReadOnly, b.SnapshotTimeUs = true, wireTime(t) }
}

// CommitWith says when the commit is acknowledged: CommitWith(Sync()) or CommitWith(Async()).
func CommitWith(durability WriteOption) TxnOption {
	return func(b *kvpb.BeginRequest) {
		o := newWriteOptions([]WriteOption{durability})
		b.Durability = o.durability
	}
}

// ErrTxnDone means that a transaction was used after its commit or rollback.
var ErrTxnDone = errors.New("client: the transaction has ended")

// Txn is an open transaction. It sees its own writes. It is not for concurrent use.
//
// Writes are sent with the next read, savepoint or commit, which also returns their errors. After
// an error the transaction accepts only Rollback, and RollbackTo a savepoint.
type Txn struct {
	// Constant after openTxn.
	client *Client
	ctx    context.Context // of the caller
	stream grpc.BidiStreamingClient[kvpb.TransactRequest, kvpb.TransactResponse]
	cancel context.CancelFunc

	writes    []*kvpb.Mutation // not sent
	bytes     int              // of writes
	awaited   int              // answers to come
	readEpoch Epoch
	id        uint64
	done      bool
	broken    *Error // the stream cannot be used any more
	failed    *Error // first error since begin
	committed bool   // commit was sent
	mayWrite  bool   // it was not begun as read-only
	// halfClosed: no further request can be sent. It is set with the commit, so that the end of the
	// stream follows the answer without another round trip.
	halfClosed bool
}

// Collected writes are sent when they reach these limits.
const (
	txnWritesMax = 256
	txnBytesMax  = 256 << 10
)

// Begin opens a transaction that the caller ends with Commit or Rollback. It uses one stream, and
// ctx bounds it. See Update and View, which always end the transaction and repeat it after
// conflicts.
func (c *Client) Begin(ctx context.Context, options ...TxnOption) (*Txn, error) {
	t, err := c.openTxn(ctx)
	if err != nil {
		return nil, err
	}
	t.begin(beginRequest(options))
	if _, err := t.receive(); err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// openTxn opens a stream with no transaction begun. On an error the Txn is nil.
func (c *Client) openTxn(ctx context.Context) (*Txn, error) {
	own, cancel := context.WithCancel(ctx)
	stream, err := c.transactions.Transact(own)
	if err != nil {
		cancel()
		return nil, newError(err)
	}
	return &Txn{client: c, ctx: ctx, stream: stream, cancel: cancel, done: true}, nil
}

func beginRequest(options []TxnOption) *kvpb.BeginRequest {
	request := new(kvpb.BeginRequest)
	for _, option := range options {
		option(request)
	}
	return request
}

// begin sends a begin and does not wait for its answer.
func (t *Txn) begin(request *kvpb.BeginRequest) {
	t.writes, t.bytes, t.done, t.failed, t.committed, t.readEpoch, t.mayWrite = t.writes[:0], 0, false, nil, false, 0, !request.GetReadOnly()
	t.send(&kvpb.TransactRequest{Request: &kvpb.TransactRequest_Begin{Begin: request}})
}

// endMax bounds how long the client waits for the server to end a stream that it has half-closed.
const endMax = time.Second

// close ends the stream, and with it an open transaction: the client half-closes, and the server
// ends the stream with OK. Cancelling would count as a failed request on the server. If the server
// does not answer, the stream is cancelled after endMax.
func (t *Txn) close() {
	t.done = true
	timer := time.AfterFunc(endMax, t.cancel)
	defer t.cancel()
	defer timer.Stop()
	t.halfClose()
	for t.broken == nil {
		if _, err := t.stream.Recv(); err != nil {
			t.broken = newError(err)
		}
	}
}

// halfClose ends the sending direction of the stream.
func (t *Txn) halfClose() {
	if !t.halfClosed {
		t.halfClosed = true
		_ = t.stream.CloseSend() // never fails; a broken stream shows in Recv
	}
}

// ID is the transaction's number in Client.Transactions.
func (t *Txn) ID() uint64 { return t.id }

// ReadEpoch is the epoch at which the transaction reads.
func (t *Txn) ReadEpoch() (Epoch, error) {
	if t.awaited > 0 {
		if _, err := t.receive(); err != nil {
			return 0, err
		}
	}
	return t.readEpoch, nil
}

// send sends a request. A later receive awaits its answer and its error.
func (t *Txn) send(request *kvpb.TransactRequest) {
	if t.broken != nil {
		return
	}
	t.awaited++
	_ = t.stream.Send(request) // io.EOF here means that Recv has the reason
}

// receive awaits all outstanding answers, and returns the last one, or the first error.
func (t *Txn) receive() (last *kvpb.TransactResponse, err error) {
	for ; t.awaited > 0 && t.broken == nil; t.awaited-- {
		response, err := t.stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			t.fail(newError(status.Error(codes.Unavailable, "the server has ended the stream")), true)
		case err != nil:
			t.fail(newError(err), true)
		case response.GetError() != nil:
			t.fail(newError(status.FromProto(response.GetError()).Err()), false)
		default:
			if begun := response.GetBegin(); begun != nil {
				t.id, t.readEpoch = begun.GetId(), Epoch(begun.GetReadEpoch())
			}
			last = response
		}
	}
	if t.failed != nil {
		return nil, t.failed
	}
	return last, nil
}

func (t *Txn) fail(e *Error, broken bool) {
	if t.failed == nil {
		t.failed = e
	}
	if broken {
		t.broken = e
	}
}

// call sends the collected writes and then a request, and awaits the answer.
func (t *Txn) call(request *kvpb.TransactRequest) (*kvpb.TransactResponse, error) {
	if t.done {
		return nil, ErrTxnDone
	}
	if t.failed != nil {
		return nil, t.failed
	}
	t.flush()
	t.send(request)
	return t.receive()
}

func (t *Txn) flush() {
	if len(t.writes) > 0 {
		t.send(&kvpb.TransactRequest{Request: &kvpb.TransactRequest_Write{Write: &kvpb.WriteRequest{Mutations: t.writes}}})
	}
	clear(t.writes) // they refer to keys and values
	t.writes, t.bytes = t.writes[:0], 0
}

// Get reads key. A missing key is not an error.
func (t *Txn) Get(key []byte) (Value, error) {
	response, err := t.call(&kvpb.TransactRequest{Request: &kvpb.TransactRequest_Get{Get: &kvpb.KeyReadRequest{Key: key}}})
	if err != nil {
		return Value{}, err
	}
	return valueOf(response.GetGet()), nil
}

// BatchGet reads keys and answers in their order.
func (t *Txn) BatchGet(keys [][]byte) ([]Value, error) {
	return inParts(keys, func(rest [][]byte) (*kvpb.BatchGetResponse, error) {
		response, err := t.call(&kvpb.TransactRequest{
			Request: &kvpb.TransactRequest_BatchGet{BatchGet: &kvpb.BatchReadRequest{Keys: rest}},
		})
		return response.GetBatchGet(), err
	})
}

// Scan iterates over the entries of r. The options At and ResumeToken do not apply. Entries after
// the end of the iteration do not count as read, except for the rest of the page.
func (t *Txn) Scan(r Range, o ScanOptions) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		request := &kvpb.RangeReadRequest{
			Range: r.wire(), Reverse: o.Reverse, Limit: o.Limit, KeysOnly: o.KeysOnly, PageBytes: o.PageBytes,
		}
		for {
			response, err := t.call(&kvpb.TransactRequest{Request: &kvpb.TransactRequest_Scan{Scan: request}})
			if err != nil {
				yield(Entry{}, err)
				return
			}
			page := entriesOf(response.GetScan().GetEntries())
			for _, e := range page {
				if !yield(e, nil) {
					return
				}
			}
			if !response.GetScan().GetMore() || !continueAfter(request, page) {
				return
			}
		}
	}
}

// continueAfter moves the request to the keys after a page; false if its limit is reached.
func continueAfter(request *kvpb.RangeReadRequest, page []Entry) bool {
	if n := uint64(len(page)); request.Limit > 0 {
		if request.Limit <= n {
			return false
		}
		request.Limit -= n
	}
	last := page[len(page)-1].Key
	r := request.Range
	if len(r.Prefix) > 0 {
		r = &kvpb.KeyRange{Start: r.Prefix, End: successor(r.Prefix)}
	}
	if request.Reverse {
		request.Range = &kvpb.KeyRange{Start: r.Start, End: last}
	} else {
		request.Range = &kvpb.KeyRange{Start: append(append([]byte(nil), last...), 0), End: r.End}
	}
	return true
}

// successor is the first key after all keys that begin with prefix; nil if there is none.
func successor(prefix []byte) []byte {
	for i := len(prefix) - 1; i >= 0; i-- {
		if prefix[i] != 0xff {
			out := append([]byte(nil), prefix[:i+1]...)
			out[i]++
			return out
		}
	}
	return nil
}

// Put sets key to value. Both are kept, not copied, until they are sent.
func (t *Txn) Put(key, value []byte) error {
	return t.write(&kvpb.Mutation{Kind: kvpb.Mutation_KIND_PUT, Key: key, Value: value})
}

// Delete removes key.
func (t *Txn) Delete(key []byte) error {
	return t.write(&kvpb.Mutation{Kind: kvpb.Mutation_KIND_DELETE, Key: key})
}

func (t *Txn) write(m *kvpb.Mutation) error {
	if t.done {
		return ErrTxnDone
	}
	if t.failed != nil {
		return t.failed
	}
	t.writes = append(t.writes, m)
	t.bytes += len(m.GetKey()) + len(m.GetValue())
	if len(t.writes) < txnWritesMax && t.bytes < txnBytesMax {
		return nil
	}
	return t.Flush()
}

// Flush sends the collected writes at once and returns their error.
func (t *Txn) Flush() error {
	if t.done {
		return ErrTxnDone
	}
	t.flush()
	_, err := t.receive()
	return err
}

// DeleteRange removes the keys of r that the transaction sees, and returns their number.
func (t *Txn) DeleteRange(r Range) (uint64, error) {
	response, err := t.call(&kvpb.TransactRequest{
		Request: &kvpb.TransactRequest_DeleteRange{DeleteRange: &kvpb.RangeDeleteRequest{Range: r.wire()}},
	})
	return response.GetDeleteRange().GetDeleted(), err
}

// Invoke reads, changes and writes a key.
func (t *Txn) Invoke(i Invocation) (Outcome, error) {
	response, err := t.call(&kvpb.TransactRequest{Request: &kvpb.TransactRequest_Invoke{Invoke: i.wire}})
	if err != nil {
		return Outcome{}, err
	}
	return outcomeOf(response.GetInvoke()), nil
}

// Savepoint names the current state, for RollbackTo.
func (t *Txn) Savepoint() (uint64, error) {
	response, err := t.call(&kvpb.TransactRequest{Request: &kvpb.TransactRequest_Savepoint{Savepoint: new(kvpb.SavepointRequest)}})
	return response.GetSavepoint().GetSavepoint(), err
}

// RollbackTo undoes the writes since a savepoint, which stays. It also clears an error that
// occurred since then.
func (t *Txn) RollbackTo(savepoint uint64) error {
	if t.done {
		return ErrTxnDone
	}
	t.flush()
	_, _ = t.receive() // failed requests are undone
	if t.broken != nil {
		return t.broken
	}
	before := t.failed
	t.failed = nil
	t.send(&kvpb.TransactRequest{
		Request: &kvpb.TransactRequest_RollbackTo{RollbackTo: &kvpb.RollbackToRequest{Savepoint: savepoint}},
	})
	_, err := t.receive()
	if err != nil && before != nil {
		t.failed = before
	}
	return err
}

// Commit ends the transaction and returns its epoch, zero if it wrote nothing. After an error
// nothing was committed, unless the error's OutcomeUnknown is true.
func (t *Txn) Commit() (Epoch, error) {
	epoch, err := t.commit()
	if !errors.Is(err, ErrTxnDone) {
		t.close()
	}
	return epoch, err
}

// commit is Commit that leaves the stream to close.
func (t *Txn) commit() (Epoch, error) {
	if t.done {
		return 0, ErrTxnDone
	}
	if t.failed != nil {
		t.rollback()
		return 0, t.failed
	}
	t.committed, t.done = true, true
	t.flush()
	request := new(kvpb.CommitRequest)
	var id RequestID
	if t.mayWrite {
		id = t.client.NewRequestID()
		request.RequestId = id[:]
	}
	t.send(&kvpb.TransactRequest{Request: &kvpb.TransactRequest_Commit{Commit: request}})
	t.halfClose()
	response, err := t.receive()
	if err != nil && t.mayWrite {
		return t.resolve(id, err)
	}
	return Epoch(response.GetCommit().GetEpoch()), err
}

// resolve asks what became of a commit whose answer was lost, and makes sure that nothing becomes of it later.
func (t *Txn) resolve(id RequestID, lost error) (Epoch, error) {
	e := t.failed
	if t.client.adjustClock(e) { // the id was sent for the first time
		return 0, t.failNotExecuted()
	}
	if !e.OutcomeUnknown() {
		return 0, lost
	}
	state, epoch, err := t.client.Outcome(t.ctx, id, true)
	switch {
	case err == nil && state == Applied:
		t.failed = nil
		return epoch, nil
	case err == nil && state == Cancelled:
		return 0, t.failNotExecuted()
	}
	return 0, lost
}

// failNotExecuted notes that the commit which failed was not executed, and never will be.
func (t *Txn) failNotExecuted() error {
	known := *t.failed
	known.notExecuted = true
	t.failed = &known
	return t.failed
}

// Rollback ends the transaction and undoes its writes. After Commit it does nothing, so that it may
// be deferred.
func (t *Txn) Rollback() {
	if !t.done {
		t.sendRollback()
		t.close()
	}
}

// rollback ends the transaction and leaves the stream for another.
func (t *Txn) rollback() {
	if t.done {
		return
	}
	t.sendRollback()
	_, _ = t.receive() // the transaction has ended in any case
}

func (t *Txn) sendRollback() {
	t.done = true
	clear(t.writes)
	t.writes, t.bytes = t.writes[:0], 0
	t.send(&kvpb.TransactRequest{Request: &kvpb.TransactRequest_Rollback{Rollback: new(kvpb.RollbackRequest)}})
}

// Transactions lists the open interactive transactions of the server, oldest first.
func (c *Client) Transactions(ctx context.Context) ([]*kvpb.TransactionInfo, error) {
	response, err := call(ctx, c, safe, c.admin.ListTransactions, &kvpb.ListTransactionsRequest{})
	return response.GetTransactions(), err
}

// EndTransaction rolls back the transaction with this id, also one of another client.
func (c *Client) EndTransaction(ctx context.Context, id uint64) error {
	_, err := call(ctx, c, safe, c.admin.EndTransaction, &kvpb.EndTransactionRequest{Id: id})
	return err
}

// Snapshots lists what prevents garbage collection of old versions on the server, the smallest
// epoch first.
func (c *Client) Snapshots(ctx context.Context) ([]*kvpb.SnapshotInfo, error) {
	response, err := call(ctx, c, safe, c.admin.ListSnapshots, &kvpb.ListSnapshotsRequest{})
	return response.GetSnapshots(), err
}

// EndSnapshot ends the snapshot with this id and the request that uses it, also one of another
// client.
func (c *Client) EndSnapshot(ctx context.Context, id uint64) error {
	_, err := call(ctx, c, safe, c.admin.EndSnapshot, &kvpb.EndSnapshotRequest{Id: id})
	return err
}
