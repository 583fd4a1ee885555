package server

import (
	"fmt"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// toDurability refuses values that this server does not know, rather than acknowledging earlier
// than the client expects.
func toDurability(d pb.Durability) (mvcc.Durability, error) {
	switch d {
	case pb.Durability_DURABILITY_UNSPECIFIED:
		return mvcc.DurabilityDefault, nil
	case pb.Durability_DURABILITY_SYNC:
		return mvcc.DurabilitySync, nil
	case pb.Durability_DURABILITY_ASYNC:
		return mvcc.DurabilityAsync, nil
	}
	return 0, invalid("durability", fmt.Sprintf("%d is not known to this server", d))
}

// appendConditions adds the preconditions of a request to dst. Keys and values alias the request.
func appendConditions(dst []mvcc.Condition, preconditions []*pb.Precondition, returnCurrent bool) ([]mvcc.Condition, error) {
	for i, p := range preconditions {
		c, err := toCondition(p, "preconditions", i)
		if err != nil {
			return dst, err
		}
		c.ReturnCurrent = returnCurrent
		dst = append(dst, c)
	}
	return dst, nil
}

// toCondition reads the precondition at a position of the request's list.
func toCondition(p *pb.Precondition, list string, i int) (mvcc.Condition, error) {
	if is, ok := p.GetCondition().(*pb.Precondition_Fence); ok {
		return toFence(p, is.Fence, fmt.Sprintf("%s[%d]", list, i))
	}
	c := mvcc.Condition{Key: p.GetKey()}
	if len(c.Key) == 0 {
		return c, &argumentError{
			reason: pb.ErrorReason_ERROR_REASON_KEY_EMPTY, field: fmt.Sprintf("%s[%d].key", list, i), text: "is empty",
		}
	}
	switch is := p.GetCondition().(type) {
	case *pb.Precondition_Exists:
		c.Kind = mvcc.KeyAbsent
		if is.Exists {
			c.Kind = mvcc.KeyPresent
		}
	case *pb.Precondition_ValueEquals:
		c.Kind, c.Value = mvcc.ValueEquals, is.ValueEquals
	case *pb.Precondition_EpochEquals:
		c.Kind, c.Epoch = mvcc.EpochEquals, keys.Epoch(is.EpochEquals)
	default:
		return c, invalid(fmt.Sprintf("%s[%d].condition", list, i), "is missing; give exactly one")
	}
	return c, nil
}

// toFence reads a precondition about a lock.
func toFence(p *pb.Precondition, f *pb.Fence, field string) (mvcc.Condition, error) {
	switch {
	case len(p.GetKey()) > 0:
		return mvcc.Condition{}, invalid(field+".key", "must be empty for a fence, which names a lock")
	case len(f.GetName()) == 0:
		return mvcc.Condition{}, invalid(field+".fence.name", "is empty")
	case f.GetToken() == 0:
		return mvcc.Condition{}, invalid(field+".fence.token", "is 0; give the token of the acquisition")
	}
	return mvcc.Condition{Kind: mvcc.LockHeld, Key: f.GetName(), Epoch: keys.Epoch(f.GetToken())}, nil
}

// conditional is a write that can have preconditions.
type conditional interface {
	GetPreconditions() []*pb.Precondition
	GetReturnCurrent() bool
	GetDurability() pb.Durability
}

// prepare sets what all writes have in common.
func (c *executor) prepare(req conditional) (err error) {
	c.write.Reset()
	if c.write.Durability, err = toDurability(req.GetDurability()); err != nil {
		return err
	}
	c.write.Conditions, err = appendConditions(c.write.Conditions, req.GetPreconditions(), req.GetReturnCurrent())
	return err
}

// bounds are the user keys [lower, upper) of a range; a nil upper means to the end.
type bounds struct{ lower, upper []byte }

func toBounds(r *pb.KeyRange) (bounds, error) {
	start, end, prefix := r.GetStart(), r.GetEnd(), r.GetPrefix()
	if len(prefix) > 0 {
		if len(start) > 0 || len(end) > 0 {
			return bounds{}, invalidRange("has both a prefix and bounds; give one of them")
		}
		b := bounds{lower: prefix}
		b.upper, _ = keys.Successor(nil, prefix) // stays nil when there is none
		return b, nil
	}
	b := bounds{lower: start}
	if len(end) > 0 {
		b.upper = end
		if string(start) > string(end) {
			return bounds{}, invalidRange("its start is after its end")
		}
	}
	return b, nil
}

func invalidRange(text string) error {
	return &argumentError{reason: pb.ErrorReason_ERROR_REASON_INVALID_RANGE, field: "range", text: text}
}
