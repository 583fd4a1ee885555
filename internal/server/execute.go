package server

import (
	"context"
	"fmt"
	"math"

	pb "epochkv/api/proto/epochkv/v1"
	"epochkv/internal/mvcc"
	"epochkv/internal/storage/keys"
)

// The functions here execute one request each with a caller, alone or from a pipeline. None waits for durability: each
// returns the epoch that must settle before its answer may be sent, zero if it may be sent at once.

// settle is what an answer waits for.
type settle struct {
	epoch      keys.Epoch
	durability mvcc.Durability
	write      bool // a failure leaves the outcome of a write unknown
}

// ready reports whether the answer may be sent without waiting.
func (w settle) ready(s *mvcc.Store) bool { return w.epoch == 0 || s.Settled(w.epoch, w.durability) }

// wait returns when the answer may be sent.
func (w settle) wait(ctx context.Context, s *mvcc.Store) error {
	if w.epoch == 0 {
		return nil
	}
	err := s.Wait(ctx, w.epoch, w.durability)
	if err != nil && w.write && ctx.Err() == nil {
		return &outcomeUnknownError{epoch: w.epoch, cause: err}
	}
	return err
}

// settleRead is the wait of a read that saw a commit which a crash could still take back.
func settleRead(await keys.Epoch) settle {
	return settle{epoch: await, durability: mvcc.DurabilitySync}
}

// get answers into out. The value is appended to buf and aliases it.
func (c *caller) get(req *pb.GetRequest, out *pb.GetResponse, buf []byte) (settle, error) {
	v, err := c.session.Get(buf, req.Key, keys.Epoch(req.SnapshotEpoch))
	if err != nil {
		return settle{}, err
	}
	out.Found, out.Value, out.Epoch, out.ReadEpoch = v.Found, v.Data, uint64(v.Epoch), uint64(v.At)
	return settleRead(v.Await), nil
}

func (c *caller) put(req *pb.PutRequest) (settle, error) {
	if err := c.prepare(req.Preconditions, req.Durability); err != nil {
		return settle{}, err
	}
	c.write.Set(req.Key, req.Value)
	return c.commit()
}

func (c *caller) delete(req *pb.DeleteRequest) (settle, error) {
	if err := c.prepare(req.Preconditions, req.Durability); err != nil {
		return settle{}, err
	}
	c.write.Delete(req.Key)
	return c.commit()
}

func (c *caller) batchWrite(req *pb.BatchWriteRequest) (settle, error) {
	if err := c.prepare(req.Preconditions, req.Durability); err != nil {
		return settle{}, err
	}
	for i, m := range req.Mutations {
		if err := c.addMutation(m, "mutations", i); err != nil {
			return settle{}, err
		}
	}
	return c.commit()
}

// addMutation adds the mutation at a position of the request's list to the write.
func (c *caller) addMutation(m *pb.Mutation, list string, i int) error {
	switch m.GetKind() {
	case pb.Mutation_KIND_PUT:
		c.write.Set(m.Key, m.Value)
		return nil
	case pb.Mutation_KIND_DELETE:
		if len(m.Value) > 0 {
			return invalid(fmt.Sprintf("%s[%d].value", list, i), "a deletion has no value")
		}
		c.write.Delete(m.Key)
		return nil
	}
	return invalid(fmt.Sprintf("%s[%d].kind", list, i), fmt.Sprintf("%d is not a kind of mutation", m.GetKind()))
}

func (c *caller) commit() (settle, error) {
	epoch, err := c.session.Commit(&c.write)
	return settle{epoch: epoch, durability: c.write.Durability, write: true}, err
}

// batchGet answers into out, whose results it reuses. The answer is bounded like a batch, so that a list of keys cannot
// ask for more memory than a write may bring.
func (c *caller) batchGet(req *pb.BatchGetRequest, out *pb.BatchGetResponse, limits *limits) (settle, error) {
	if n := len(req.Keys); n > limits.BatchOps {
		return settle{}, &mvcc.LimitError{What: "batch operations", Limit: limits.BatchOps, Got: n}
	}
	at, err := c.session.View(keys.Epoch(req.SnapshotEpoch))
	if err != nil {
		return settle{}, err
	}
	defer c.session.Done()
	out.ReadEpoch = uint64(at)
	await, size := keys.Epoch(0), 0
	var values valueArena
	for i, key := range req.Keys {
		r := nextResult(out)
		v, err := values.read(c, r.Value[:0], key, len(req.Keys)-i)
		if err != nil {
			return settle{}, fmt.Errorf("keys[%d]: %w", i, err)
		}
		r.Found, r.Value, r.Epoch = v.Found, v.Data, uint64(v.Epoch)
		await = max(await, v.Await)
		if size += len(key) + len(v.Data); size > limits.BatchBytes {
			return settle{}, &mvcc.LimitError{What: "batch bytes", Limit: limits.BatchBytes, Got: size}
		}
	}
	return settleRead(await), nil
}

// valueArena lays the values of a batch side by side: one allocation for many small values.
type valueArena struct {
	buf  []byte // what is used of the chunk at hand
	last int    // length of the last value, a good guess for those to come
}

// arenaChunkMax bounds what a wrong guess costs.
const arenaChunkMax = 64 << 10

// read appends the value of key to dst, or, if that has no room at all, puts it into the arena; left is how many keys are
// still to be read.
func (a *valueArena) read(c *caller, dst, key []byte, left int) (mvcc.Value, error) {
	if cap(dst) > 0 {
		return c.session.Read(dst, key)
	}
	if free := cap(a.buf) - len(a.buf); free < a.last && a.last <= arenaChunkMax/4 {
		a.buf = make([]byte, 0, min(left*a.last, arenaChunkMax))
	}
	used := len(a.buf)
	v, err := c.session.Read(a.buf[used:], key)
	a.last = len(v.Data)
	if a.last > 0 && used+a.last <= cap(a.buf) && &v.Data[0] == &a.buf[:used+1][used] { // else it did not fit and lies elsewhere
		a.buf = a.buf[:used+a.last]
		v.Data = v.Data[:a.last:a.last]
	}
	return v, err
}

// nextResult extends the results by one, taking up again one that an earlier answer has left behind.
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

func (c *caller) deleteRange(req *pb.DeleteRangeRequest, out *pb.DeleteRangeResponse) (settle, error) {
	if req.Range == nil {
		return settle{}, invalidRange("is missing; an empty range means all keys")
	}
	if req.Limit > math.MaxInt32 {
		return settle{}, invalid("limit", "is larger than any batch; 0 means no limit")
	}
	b, err := toBounds(req.Range)
	if err != nil {
		return settle{}, err
	}
	durability, err := toDurability(req.Durability)
	if err != nil {
		return settle{}, err
	}
	conditions, err := appendConditions(nil, req.Preconditions)
	if err != nil {
		return settle{}, err
	}
	done, err := c.session.DeleteRange(mvcc.RangeDelete{
		Lower: b.lower, Upper: b.upper, Limit: int(req.Limit), Conditions: conditions, Durability: durability,
	})
	if err != nil {
		return settle{}, err
	}
	out.Deleted, out.More = uint64(done.Count), done.More
	if done.Count == 0 {
		return settleRead(done.Await), nil
	}
	out.Epoch = uint64(done.Epoch)
	return settle{epoch: done.Epoch, durability: durability, write: true}, nil
}
