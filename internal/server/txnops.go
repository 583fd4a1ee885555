package server

import (
	"context"
	"fmt"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/transport"
)

// The functions in this file are the operations that Transact and Execute share. Each executes one
// operation in an open transaction and returns a message that aliases no other memory. Those with many values count them while they are read:
// admit is executor.admitGrowing, with what was read before.

func txnGet(t *mvcc.Txn, req *pb.KeyReadRequest) (*pb.GetResponse, error) {
	v, err := t.Get(nil, req.GetKey())
	if err != nil {
		return nil, err
	}
	f, err := t.Metadata()
	return &pb.GetResponse{
		Found: v.Found, Value: v.Data, Epoch: uint64(v.Epoch), ReadEpoch: uint64(v.At), ExpiresAtMs: f.ExpiresAt,
	}, err
}

func txnBatchGet(ctx context.Context, t *mvcc.Txn, req *pb.BatchReadRequest, limits *limits, admit func(bytes int) error) (*pb.BatchGetResponse, error) {
	if n := len(req.Keys); n > limits.BatchOps {
		return nil, &mvcc.LimitError{What: "batch operations", Limit: limits.BatchOps, Got: n}
	}
	out := &pb.BatchGetResponse{ReadEpoch: uint64(t.At()), Results: make([]*pb.BatchGetResult, 0, len(req.Keys))}
	size := 0
	var yielder transport.Yielder
	for i, key := range req.Keys {
		yielder.Did(1)
		if size >= batchGetBytesMax {
			out.Results = append(out.Results, &pb.BatchGetResult{Unread: true})
			continue
		}
		if ctx.Err() != nil { // each may read a page
			return nil, context.Cause(ctx)
		}
		v, err := t.Get(nil, key)
		if err != nil {
			return nil, fmt.Errorf("keys[%d]: %w", i, err)
		}
		f, err := t.Metadata()
		if err != nil {
			return nil, fmt.Errorf("keys[%d]: %w", i, err)
		}
		size += len(key) + len(v.Data)
		if err := admit(size); err != nil {
			return nil, err
		}
		out.Results = append(out.Results, &pb.BatchGetResult{Found: v.Found, Value: v.Data, Epoch: uint64(v.Epoch), ExpiresAtMs: f.ExpiresAt})
	}
	return out, nil
}

// entryMemory is what an entry of a page takes in memory beside its key and value.
const entryMemory = 192

// txnScanSteps is how many entries of a page are made before others run.
const txnScanSteps = 512

// txnScan returns one page. It reads no further than the page's last entry, so that later keys do
// not count as read.
func txnScan(ctx context.Context, t *mvcc.Txn, req *pb.RangeReadRequest, admit func(bytes int) error) (*pb.RangeReadResponse, error) {
	b, err := toBounds(req.GetRange())
	if err != nil {
		return nil, err
	}
	pageBytes := scanPageBytesDefault
	if req.PageBytes > 0 {
		pageBytes = int(min(req.PageBytes, scanPageBytesMax))
	}
	out, size := new(pb.RangeReadResponse), 0
	c, err := t.Scan(mvcc.ScanOptions{
		Lower: b.lower, Upper: b.upper, Reverse: req.Reverse, KeysOnly: req.KeysOnly, Limit: scanLimit(req.Limit), Context: ctx,
		Admit: func(bytes int) error { return admit(size + bytes + (len(out.Entries)+1)*entryMemory) }, Steps: txnScanSteps,
	})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	for c.Next() {
		f, err := c.Metadata()
		if err != nil {
			return nil, err
		}
		e := &pb.Entry{
			Key: append([]byte(nil), c.Key()...), Value: append([]byte(nil), c.Value()...), Epoch: uint64(c.Epoch()), ExpiresAtMs: f.ExpiresAt, LeaseId: f.Lease,
		}
		out.Entries = append(out.Entries, e)
		size += entryBytes(e.Key, e.Value)
		if err := admit(size + len(out.Entries)*entryMemory); err != nil {
			return nil, err
		}
		if size >= pageBytes || uint64(len(out.Entries)) == req.Limit {
			out.More = true
			break
		}
	}
	return out, c.Err()
}

func txnWrite(t *mvcc.Txn, m *pb.Mutation, field string) error {
	switch m.GetKind() {
	case pb.Mutation_KIND_PUT:
		f, err := toMetadata(m, nowMillis(t.Store()), field+".")
		if err != nil {
			return err
		}
		return t.SetWithMetadata(m.Key, m.Value, &f)
	case pb.Mutation_KIND_DELETE:
		if len(m.Value) > 0 {
			return invalid(field+".value", "a deletion has no value")
		}
		if m.LeaseId != 0 {
			return invalid(field+".lease_id", "a deletion has no lease")
		}
		if err := noLifetime(m, field+"."); err != nil {
			return err
		}
		return t.Delete(m.Key)
	}
	return invalid(field+".kind", fmt.Sprintf("%d is not a kind of mutation", m.GetKind()))
}

func txnWriteAll(t *mvcc.Txn, req *pb.WriteRequest) (*pb.WriteResponse, error) {
	if len(req.GetMutations()) == 0 {
		return nil, mvcc.ErrEmptyBatch
	}
	var yielder transport.Yielder
	for i, m := range req.Mutations {
		yielder.Did(1)
		if err := txnWrite(t, m, fmt.Sprintf("mutations[%d]", i)); err != nil {
			return nil, err
		}
	}
	return new(pb.WriteResponse), nil
}

func txnDeleteRange(ctx context.Context, t *mvcc.Txn, req *pb.RangeDeleteRequest) (*pb.RangeDeleteResponse, error) {
	if req.GetRange() == nil {
		return nil, invalidRange("is missing; an empty range means all keys")
	}
	b, err := toBounds(req.Range)
	if err != nil {
		return nil, err
	}
	n, err := t.DeleteRange(ctx, b.lower, b.upper)
	return &pb.RangeDeleteResponse{Deleted: uint64(n)}, err
}

func txnInvoke(t *mvcc.Txn, in *pb.Invocation) (*pb.InvokeResult, error) {
	var op mvcc.Invoke
	if err := toInvoke(&op, in, nowMillis(t.Store()), "invocation"); err != nil {
		return nil, err
	}
	out, err := t.Invoke(&op)
	if err != nil {
		return nil, err
	}
	return invokeResult(&out, op.ReturnOld, op.ReturnNew), nil
}
