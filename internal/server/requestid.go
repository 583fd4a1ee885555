package server

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// A request with a request_id is executed at most once: package mvcc keeps a record of it. The functions here read the id,
// hash what the request asks for, and make an answer of the record that an earlier attempt left.

// Methods in the records of requests; docs/formats.md has them, too.
const (
	recordPut uint8 = iota + 1
	recordDelete
	recordBatchWrite
	recordDeleteRange
	recordInvoke
	recordInvokeAll
	recordExecute
	recordCommit
)

// methodBytes are the methods as bytes to be hashed: a slice of one byte would be allocated for each request.
var methodBytes = [recordCommit + 1]byte{0, recordPut, recordDelete, recordBatchWrite, recordDeleteRange, recordInvoke, recordInvokeAll, recordExecute, recordCommit}

// requestTimeError is an id whose time is too far from the server's.
type requestTimeError struct{ at uint64 }

func (e *requestTimeError) Error() string {
	return fmt.Sprintf("the time of the request_id is more than %v ahead of the server's clock", mvcc.RequestAheadMax)
}

// requestMessage is a message with a request_id.
type requestMessage interface {
	encoder
	GetRequestId() []byte
}

// toRequest reads the id of a request. It is nil if there is none. The result is valid until the next call.
func (c *executor) toRequest(m requestMessage, method uint8) (*mvcc.Request, error) {
	if len(m.GetRequestId()) == 0 {
		return nil, nil //nolint:nilnil // most requests have no id, and nothing is wrong
	}
	r := &c.request
	*r = mvcc.Request{Method: method, Identity: c.identity()}
	var err error
	if r.ID, err = c.toRequestID(m.GetRequestId()); err != nil {
		return nil, err
	}
	c.noted.id, c.noted.hasID, c.noted.any = r.ID, true, true
	r.Hash, err = c.hashRequest(m, method)
	return r, err
}

// toRequestID checks an id. Without a bound of its time, a record of it might stay for ever.
func (c *executor) toRequestID(b []byte) (mvcc.RequestID, error) {
	id, err := mvcc.ToRequestID(b)
	if err != nil {
		return id, invalid("request_id", "is not a UUID of version 7 (16 bytes)")
	}
	if now := c.now() / 1000; id.Time() > now+uint64(mvcc.RequestAheadMax.Milliseconds()) {
		return id, &requestTimeError{at: now}
	}
	return id, nil
}

// hashRequest hashes the method and what the message asks for: its encoding without id and durability.
func (c *executor) hashRequest(m requestMessage, method uint8) (uint32, error) {
	seed := crc32.Update(0, castagnoli, methodBytes[method:method+1])
	if method == recordCommit {
		return seed, nil // another attempt of a transaction may have read and written something else
	}
	id, durability := besides(m)
	wasID, wasDurability := *id, *durability
	*id, *durability = nil, pb.Durability_DURABILITY_UNSPECIFIED
	size := m.SizeVT()
	if size > cap(c.scratch) {
		c.scratch = make([]byte, max(size, 512))
	}
	_, err := m.MarshalToSizedBufferVT(c.scratch[:size])
	*id, *durability = wasID, wasDurability
	if err != nil {
		return 0, fmt.Errorf("hash of the request: %w", err)
	}
	hash := crc32.Update(seed, castagnoli, c.scratch[:size])
	if cap(c.scratch) > pooledBytesMax {
		c.scratch = nil
	}
	return hash, nil
}

// besides are the fields of a message that do not belong to what it asks for.
func besides(m requestMessage) (id *[]byte, d *pb.Durability) {
	switch r := m.(type) {
	case *pb.PutRequest:
		return &r.RequestId, &r.Durability
	case *pb.DeleteRequest:
		return &r.RequestId, &r.Durability
	case *pb.BatchWriteRequest:
		return &r.RequestId, &r.Durability
	case *pb.DeleteRangeRequest:
		return &r.RequestId, &r.Durability
	case *pb.InvokeRequest:
		return &r.RequestId, &r.Durability
	case *pb.InvokeAllRequest:
		return &r.RequestId, &r.Durability
	case *pb.ExecuteRequest:
		return &r.RequestId, &r.Durability
	}
	return new([]byte), new(pb.Durability)
}

// identify makes the write be applied at most once, if the message has an id. It follows prepare, and precedes the
// operations.
func (c *executor) identify(m requestMessage, method uint8) error {
	r, err := c.toRequest(m, method)
	if err == nil {
		c.write.Identify(r)
	}
	return err
}

// before returns the outcome of an earlier attempt if err says that there was one. Its answer waits as the first one's:
// until the commit is visible and, for a SYNC request, durable. A durability of its own lets a repeated request ask for more.
func (c *executor) before(err error, d mvcc.Durability) (mvcc.Outcome, ackWait, bool) {
	applied, ok := errors.AsType[*mvcc.AppliedError](err)
	if !ok {
		return mvcc.Outcome{}, ackWait{}, false
	}
	c.admission.deduplicated.Add(1)
	out := applied.Outcome
	return out, ackWait{epoch: out.Epoch, durability: d, write: true, deduplicated: true}, true
}

// decoder is a generated message.
type decoder interface{ UnmarshalVT(data []byte) error }

// decodeResult reads the result that an earlier attempt left, sets the epoch of then, and reports whether the result was too
// long to be kept.
func decodeResult(out mvcc.Outcome, into decoder, epoch *uint64) (dropped bool, err error) {
	defer func() { *epoch = uint64(out.Epoch) }() // the result is encoded before the epoch is known
	if out.State == mvcc.OutcomeResultDropped {
		return true, nil
	}
	if err := into.UnmarshalVT(out.Result); err != nil {
		return false, fmt.Errorf("the record of the request: %w", err)
	}
	return false, nil
}

// resultOf encodes a message for the record.
func resultOf(m encoder) []byte {
	b := make([]byte, m.SizeVT())
	_, _ = m.MarshalToSizedBufferVT(b) // generated encoders do not fail
	return b
}

// GetOutcome implements Transactions.
func (s *txnService) GetOutcome(ctx context.Context, req *pb.GetOutcomeRequest) (*pb.GetOutcomeResponse, error) {
	history := s.lineage()
	out := &pb.GetOutcomeResponse{Lineage: history[:]}
	return out, s.run(ctx, func(c *executor) (ackWait, error) { return c.getOutcome(ctx, req, out) })
}

// getOutcome waits until what it tells is durable, so that no crash takes back an answer on which a client decides.
func (c *executor) getOutcome(ctx context.Context, req *pb.GetOutcomeRequest, out *pb.GetOutcomeResponse) (ackWait, error) {
	id, err := c.toRequestID(req.RequestId)
	if err != nil {
		return ackWait{}, err
	}
	c.request = mvcc.Request{ID: id, Identity: c.identity()}
	var found mvcc.Outcome
	if req.Fence {
		found, _, err = c.session.Fence(ctx, &c.request, mvcc.DurabilitySync)
	} else {
		found, err = c.session.Outcome(ctx, &c.request)
	}
	if err == nil && found.Identity != c.request.Identity && found.Epoch != 0 { // of another user
		if err = c.checkAgain(); err == nil && !c.access.isAdministrator() {
			err = mvcc.ErrRequestReused
		}
	}
	if err != nil {
		return ackWait{}, err
	}
	out.State = wireOutcome(found.State)
	if out.State == pb.OutcomeState_OUTCOME_STATE_APPLIED {
		out.Epoch = uint64(found.Epoch)
		if err := setResult(out, found); err != nil {
			return ackWait{}, err
		}
	}
	return ackWait{epoch: found.Epoch, durability: mvcc.DurabilitySync, write: req.Fence}, nil
}

func wireOutcome(s mvcc.OutcomeState) pb.OutcomeState {
	switch s {
	case mvcc.OutcomeApplied, mvcc.OutcomeResultDropped:
		return pb.OutcomeState_OUTCOME_STATE_APPLIED
	case mvcc.OutcomeCancelled:
		return pb.OutcomeState_OUTCOME_STATE_CANCELLED
	case mvcc.OutcomeNotApplied:
		return pb.OutcomeState_OUTCOME_STATE_NOT_APPLIED
	}
	return pb.OutcomeState_OUTCOME_STATE_EXPIRED
}

func setResult(out *pb.GetOutcomeResponse, found mvcc.Outcome) (err error) {
	switch found.Method {
	case recordDeleteRange:
		m := &pb.DeleteRangeResponse{}
		out.ResultDropped, err = decodeResult(found, m, &m.Epoch)
		out.Response = &pb.GetOutcomeResponse_DeleteRange{DeleteRange: m}
	case recordInvoke:
		m := &pb.InvokeResponse{}
		out.ResultDropped, err = decodeResult(found, m, &m.Epoch)
		out.Response = &pb.GetOutcomeResponse_Invoke{Invoke: m}
	case recordInvokeAll:
		m := &pb.InvokeAllResponse{}
		out.ResultDropped, err = decodeResult(found, m, &m.Epoch)
		out.Response = &pb.GetOutcomeResponse_InvokeAll{InvokeAll: m}
	case recordExecute:
		m := &pb.ExecuteResponse{}
		out.ResultDropped, err = decodeResult(found, m, &m.Epoch)
		out.Response = &pb.GetOutcomeResponse_Execute{Execute: m}
	}
	if out.ResultDropped {
		out.Response = nil
	}
	return err
}

// classifyRequestID classifies the refusals of request ids.
func classifyRequestID(err error) (fault, bool) {
	if expired, ok := errors.AsType[*mvcc.RequestExpiredError](err); ok {
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED, metadata: map[string]string{
			"server_time": strconv.FormatUint(expired.Now, 10), "cutoff": strconv.FormatUint(expired.Cutoff, 10),
		}}, true
	}
	if ahead, ok := errors.AsType[*requestTimeError](err); ok {
		return fault{
			code: codes.InvalidArgument, reason: pb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE, field: "request_id",
			metadata: map[string]string{"server_time": strconv.FormatUint(ahead.at, 10)},
		}, true
	}
	switch {
	case errors.Is(err, mvcc.ErrRequestReused):
		return fault{code: codes.InvalidArgument, reason: pb.ErrorReason_ERROR_REASON_REQUEST_ID_REUSED, field: "request_id"}, true
	case errors.Is(err, mvcc.ErrRequestCancelled):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED}, true
	}
	return fault{}, false
}
