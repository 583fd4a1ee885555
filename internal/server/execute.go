package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Each function in this file executes one request with an executor, for a unary call or a pipeline.
// It does not wait for durability but returns the epoch for which its answer must wait, or zero if
// the answer may be sent at once. An error waits like an answer, because it may reveal commits that
// a crash could still take back.

// ackWait is what an answer waits for before it may be sent.
type ackWait struct {
	epoch      keys.Epoch
	durability mvcc.Durability
	write      bool // if the wait fails, the outcome of a write is unknown

	deduplicated bool // the write is that of an earlier attempt of the request
}

// ready reports whether the answer may be sent without waiting.
func (w ackWait) ready(s *mvcc.Store) bool {
	return w.epoch == 0 || s.Acknowledgeable(w.epoch, w.durability)
}

// wait returns when the answer may be sent.
func (w ackWait) wait(ctx context.Context, s *mvcc.Store) error {
	if w.epoch == 0 {
		return nil
	}
	if w.write {
		return s.WaitWritten(ctx, w.epoch, w.durability)
	}
	return s.Wait(ctx, w.epoch, w.durability)
}

// ackRead is the wait of a read that saw a commit which a crash could still take back.
func ackRead(await keys.Epoch) ackWait {
	return ackWait{epoch: await, durability: mvcc.DurabilitySync}
}

// revealing is w for an outcome that also reveals reads up to an epoch, zero for none. The versions
// that a commit has read are older than the commit, so one wait is enough.
func (w ackWait) revealing(await keys.Epoch) ackWait {
	switch {
	case await == 0:
		return w
	case w.epoch == 0:
		return ackRead(await)
	}
	w.epoch, w.durability = max(w.epoch, await), mvcc.DurabilitySync
	return w
}

// outcome completes the result of a request: it adds the epoch that the writes reveal, and copies
// an error out of the session's memory. It is called for each request before the session is used
// again.
//
// An error tells of what was read, too: a conflict, or the type of a value. So the rights are checked
// again before it is returned; a request without one has checked them itself.
func (c *executor) outcome(w ackWait, err error) (ackWait, error) {
	if err != nil {
		err = cmp.Or(c.checkAgain(), err)
		w.write, err = false, detached(err) // nothing was written whose outcome could be unknown
	}
	if len(c.invoked.ops) > 0 {
		c.invoked.forget()
	}
	return w.revealing(c.session.Await()), err
}

// get puts the answer into out. The value is appended to buf and aliases it.
func (c *executor) get(req *pb.GetRequest, out *pb.GetResponse, buf []byte) (ackWait, error) {
	if err := c.beginRead(req.SnapshotEpoch, req.SnapshotTimeUs); err != nil {
		return ackWait{}, err
	}
	c.named(req.Key)
	v, err := c.session.Read(buf, req.Key)
	c.endRead(err)
	if err != nil {
		return ackWait{}, err
	}
	out.Found, out.Value, out.Epoch, out.ReadEpoch = v.Found, v.Data, uint64(v.Epoch), uint64(v.At)
	f, err := c.session.Metadata()
	out.ExpiresAtMs = f.ExpiresAt
	if err == nil {
		err = c.checkAgain()
	}
	return ackRead(v.Await), err
}

func (c *executor) put(ctx context.Context, req *pb.PutRequest) (ackWait, error) {
	if err := c.prepare(req); err != nil {
		return ackWait{}, err
	}
	if err := c.identify(req, recordPut); err != nil {
		return ackWait{}, err
	}
	c.named(req.Key)
	if req.TtlMs|req.ExpiresAtMs|req.LeaseId == 0 { // nearly all
		c.write.SetShared(req.Key, req.Value)
	} else if err := c.set(req.Key, req.Value, req, ""); err != nil {
		return ackWait{}, err
	}
	return c.commit(ctx)
}

func (c *executor) delete(ctx context.Context, req *pb.DeleteRequest) (ackWait, error) {
	if err := c.prepare(req); err != nil {
		return ackWait{}, err
	}
	if err := c.identify(req, recordDelete); err != nil {
		return ackWait{}, err
	}
	c.named(req.Key)
	c.write.Delete(req.Key)
	return c.commit(ctx)
}

func (c *executor) batchWrite(ctx context.Context, req *pb.BatchWriteRequest) (ackWait, error) {
	if err := c.prepare(req); err != nil {
		return ackWait{}, err
	}
	if err := c.identify(req, recordBatchWrite); err != nil {
		return ackWait{}, err
	}
	if err := c.session.TakeTurn(ctx, len(req.Mutations)); err != nil {
		return ackWait{}, err
	}
	defer c.session.LeaveTurn()
	for i, m := range req.Mutations {
		if i == 0 {
			c.named(m.GetKey())
		}
		if err := c.addMutation(m, "mutations", i); err != nil {
			return ackWait{}, err
		}
	}
	return c.commit(ctx)
}

// addMutation adds the mutation at a position of the request's list to the write.
func (c *executor) addMutation(m *pb.Mutation, list string, i int) error {
	switch m.GetKind() {
	case pb.Mutation_KIND_PUT:
		if m.TtlMs|m.ExpiresAtMs|m.LeaseId != 0 {
			return c.set(m.Key, m.Value, m, fmt.Sprintf("%s[%d].", list, i))
		}
		c.write.SetShared(m.Key, m.Value)
		return nil
	case pb.Mutation_KIND_DELETE:
		if len(m.Value) > 0 {
			return invalid(fmt.Sprintf("%s[%d].value", list, i), "a deletion has no value")
		}
		if m.LeaseId != 0 {
			return invalid(fmt.Sprintf("%s[%d].lease_id", list, i), "a deletion has no lease")
		}
		if m.TtlMs|m.ExpiresAtMs != 0 {
			return noLifetime(m, fmt.Sprintf("%s[%d].", list, i))
		}
		c.write.Delete(m.Key)
		return nil
	}
	return invalid(fmt.Sprintf("%s[%d].kind", list, i), fmt.Sprintf("%d is not a kind of mutation", m.GetKind()))
}

func (c *executor) commit(ctx context.Context) (ackWait, error) {
	own := connectionOf(ctx).owns(ownedWrites)
	if len(c.write.Conditions) == 0 { // it does not read first
		own.connection = nil
	}
	if err := c.admission.holdWrite(own); err != nil {
		return ackWait{}, err
	}
	defer c.admission.sessions.writes.release(own, 1)
	epoch, err := c.session.Commit(ctx, &c.write)
	if err != nil {
		if _, w, ok := c.before(err, c.write.Durability); ok {
			return w, nil
		}
		return ackWait{}, err
	}
	return ackWait{epoch: epoch, durability: c.write.Durability, write: true}, nil
}

// batchGetBytesMax bounds the keys and values that a BatchGet reads; it reads at least one. The
// client requests the keys that did not fit again.
const batchGetBytesMax = 4 << 20

// errAnswerFull ends the reading of a batch whose answer is full.
var errAnswerFull = errors.New("the answer is full")

// batchGet puts the answer into out, whose results it reuses.
func (c *executor) batchGet(ctx context.Context, req *pb.BatchGetRequest, out *pb.BatchGetResponse, s *Server) (_ ackWait, err error) {
	if n := len(req.Keys); n > s.limits.BatchOps {
		return ackWait{}, &mvcc.LimitError{What: "batch operations", Limit: s.limits.BatchOps, Got: n}
	}
	if err := c.beginRead(req.SnapshotEpoch, req.SnapshotTimeUs); err != nil {
		return ackWait{}, err
	}
	defer func() { c.endRead(err) }()
	if len(req.Keys) > 0 {
		c.named(req.Keys[0])
	}
	at := c.attempt.at
	out.ReadEpoch = uint64(at)
	n := len(req.Keys)
	await, size, left := keys.Epoch(0), 0, n
	for len(out.Results) < n {
		nextResult(out)
	}
	for _, r := range out.Results {
		r.Unread, r.Found, r.Epoch, r.Value, r.ExpiresAtMs = true, false, 0, r.Value[:0], 0
	}
	var values valueArena
	c.heldMax = batchGetBytesMax
	defer func() { c.heldMax = 0 }()
	err = c.session.ReadAll(ctx, req.Keys, func(i int, v mvcc.Value) error {
		if size += len(req.Keys[i]) + len(v.Data); size > batchGetBytesMax && left < n {
			return errAnswerFull
		}
		if err := c.admitGrowing(size); err != nil {
			return err
		}
		r := out.Results[i]
		r.Unread, r.Found, r.Epoch = false, v.Found, uint64(v.Epoch)
		r.Value = values.copy(r.Value[:0], v.Data, left)
		left--
		await = max(await, v.Await)
		f, err := c.session.Metadata()
		r.ExpiresAtMs = f.ExpiresAt
		return err
	})
	if errors.Is(err, errAnswerFull) {
		err = nil
		s.store.LeaseSnapshot(at, networkOf(ctx), s.config.SnapshotLeaseTTL)
	}
	if err == nil {
		err = c.checkAgain()
	}
	return ackRead(await), err
}

// valueArena stores the values of a batch next to each other: one allocation for many small values.
type valueArena struct{ buf []byte }

// arenaChunkMax bounds the memory that a wrong estimate wastes.
const arenaChunkMax = 64 << 10

// copy copies value to dst if there is room, and otherwise into the arena. left is the number of
// values that remain, this one included.
func (a *valueArena) copy(dst, value []byte, left int) []byte {
	if cap(dst) >= len(value) || len(value) > arenaChunkMax/4 {
		return append(dst, value...)
	}
	if cap(a.buf)-len(a.buf) < len(value) {
		a.buf = make([]byte, 0, min(left*len(value), arenaChunkMax))
	}
	from := len(a.buf)
	a.buf = append(a.buf, value...)
	return a.buf[from:len(a.buf):len(a.buf)]
}

// nextResult extends the results by one, taking up again one that an earlier answer has left
// after.
func nextResult(out *pb.BatchGetResponse) *pb.BatchGetResult {
	if n := len(out.Results); n < cap(out.Results) {
		out.Results = out.Results[:n+1]
		if r := out.Results[n]; r != nil {
			return r
		}
		out.Results = out.Results[:n]
	}
	r := new(pb.BatchGetResult)
	out.Results = append(out.Results, r)
	return r
}

func (c *executor) deleteRange(ctx context.Context, req *pb.DeleteRangeRequest, out *pb.DeleteRangeResponse) (ackWait, error) {
	if req.Range == nil {
		return ackWait{}, invalidRange("is missing; an empty range means all keys")
	}
	if req.Limit > math.MaxInt32 {
		return ackWait{}, invalid("limit", "is larger than any batch; 0 means no limit")
	}
	b, err := toBounds(req.Range)
	if err != nil {
		return ackWait{}, err
	}
	c.named(b.lower)
	durability, err := toDurability(req.Durability)
	if err != nil {
		return ackWait{}, err
	}
	conditions, err := appendConditions(nil, req.Preconditions, req.ReturnCurrent)
	if err != nil {
		return ackWait{}, err
	}
	request, err := c.toRequest(req, recordDeleteRange)
	if err != nil {
		return ackWait{}, err
	}
	own := connectionOf(ctx).owns(ownedWrites)
	if err := c.admission.holdWrite(own); err != nil {
		return ackWait{}, err
	}
	defer c.admission.sessions.writes.release(own, 1)
	defer c.releaseMade()
	done, err := c.session.DeleteRange(ctx, mvcc.RangeDelete{
		Lower: b.lower, Upper: b.upper, Limit: int(req.Limit), Conditions: conditions, Durability: durability, Request: request,
		Result: func(d mvcc.RangeDeleted) []byte {
			return resultOf(&pb.DeleteRangeResponse{Deleted: uint64(d.Count), More: d.More})
		},
	})
	if before, w, ok := c.before(err, durability); ok {
		out.ResultDropped, err = decodeResult(before, out, &out.Epoch)
		out.Deduplicated = true
		return w, err
	}
	if err != nil {
		return ackWait{}, err
	}
	out.Deleted, out.More = uint64(done.Count), done.More
	if done.Count == 0 {
		return ackWait{}, c.checkAgain()
	}
	out.Epoch = uint64(done.Epoch)
	return ackWait{epoch: done.Epoch, durability: durability, write: true}, nil
}
