package clienttest

import (
	"bytes"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// NewError makes an error as the server sends it. Metadata are pairs of a name and a value.
func NewError(code codes.Code, reason kvpb.ErrorReason, message string, metadata ...string) error {
	return newError(code, reason, message, 0, metadata)
}

// NewRetryError is NewError with a RetryInfo.
func NewRetryError(code codes.Code, reason kvpb.ErrorReason, message string, after time.Duration) error {
	return newError(code, reason, message, after, nil)
}

func newError(code codes.Code, reason kvpb.ErrorReason, message string, after time.Duration, metadata []string) error {
	info := &errdetails.ErrorInfo{Domain: kvpb.ErrorDomain, Reason: reason.Reason(), Metadata: map[string]string{}}
	for i := 0; i+1 < len(metadata); i += 2 {
		info.Metadata[metadata[i]] = metadata[i+1]
	}
	details := []protoadapt.MessageV1{info}
	if after > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
	}
	s, err := status.New(code, message).WithDetails(details...)
	if err != nil {
		panic(err) // details of a well-known type always marshal
	}
	return s.Err()
}

// about is metadata with a key.
func about(key []byte) (pairs []string) {
	metadata := map[string]string{}
	kvpb.SetBytes(metadata, "key", key)
	for name, value := range metadata {
		pairs = append(pairs, name, value)
	}
	return pairs
}

func (s *Server) write(method string, id []byte, conditions []*kvpb.Precondition, mutations []*kvpb.Mutation) (uint64, error) {
	if err := s.enter(method); err != nil {
		return 0, err
	}
	if err := checkMutations(mutations); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if epoch, err := s.attemptLocked(id); epoch != 0 || err != nil {
		return epoch, err
	}
	if err := s.checkPreconditionsLocked(conditions); err != nil {
		return 0, err
	}
	s.epoch++
	if len(id) > 0 {
		s.executed[string(id)] = s.epoch
	}
	for _, m := range mutations {
		s.installLocked(m.GetKey(), version{
			epoch: s.epoch, deleted: m.GetKind() == kvpb.Mutation_KIND_DELETE, value: bytes.Clone(m.GetValue()),
		})
	}
	return s.epoch, nil
}

func checkMutations(mutations []*kvpb.Mutation) error {
	if len(mutations) == 0 {
		return NewError(codes.InvalidArgument, kvpb.ErrorReason_ERROR_REASON_BATCH_EMPTY, "the batch is empty")
	}
	seen := make(map[string]bool, len(mutations))
	for _, m := range mutations {
		if err := checkKey(m.GetKey()); err != nil {
			return err
		}
		if n := len(m.GetValue()); n > valueBytesMax {
			return NewError(codes.InvalidArgument, kvpb.ErrorReason_ERROR_REASON_VALUE_TOO_LARGE, "the value is too large",
				"limit", strconv.Itoa(valueBytesMax), "size", strconv.Itoa(n))
		}
		if seen[string(m.GetKey())] {
			return NewError(codes.InvalidArgument, kvpb.ErrorReason_ERROR_REASON_DUPLICATE_KEY,
				"the batch names a key twice", about(m.GetKey())...)
		}
		seen[string(m.GetKey())] = true
	}
	return nil
}

func checkKey(key []byte) error {
	switch n := len(key); {
	case n == 0:
		return NewError(codes.InvalidArgument, kvpb.ErrorReason_ERROR_REASON_KEY_EMPTY, "the key is empty")
	case n > keyBytesMax:
		return NewError(codes.InvalidArgument, kvpb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE, "the key is too large",
			"limit", strconv.Itoa(keyBytesMax), "size", strconv.Itoa(n))
	}
	return nil
}

// readEpochLocked is the epoch that a read at asked reads at.
func (s *Server) readEpochLocked(asked uint64) (uint64, error) {
	if asked > s.epoch {
		return 0, NewError(codes.OutOfRange, kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE, "not committed yet")
	}
	if asked == 0 {
		return s.epoch, nil
	}
	return asked, nil
}

func (s *Server) checkPreconditionsLocked(conditions []*kvpb.Precondition) error {
	for i, p := range conditions {
		v := s.newestLocked(p.GetKey(), 0)
		var holds bool
		var name string
		switch c := p.GetCondition().(type) {
		case *kvpb.Precondition_Exists:
			holds, name = (v != nil) == c.Exists, "absent"
			if c.Exists {
				name = "exists"
			}
		case *kvpb.Precondition_ValueEquals:
			holds, name = v != nil && bytes.Equal(v.value, c.ValueEquals), "value_equals"
		case *kvpb.Precondition_EpochEquals:
			holds, name = v != nil && v.epoch == c.EpochEquals, "epoch_equals"
		}
		if !holds {
			var epoch uint64
			if v != nil {
				epoch = v.epoch
			}
			return NewError(codes.FailedPrecondition, kvpb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED,
				"precondition "+name+" does not hold for key "+strconv.Quote(string(p.GetKey())),
				append(about(p.GetKey()), "index", strconv.Itoa(i), "condition", name, "epoch", strconv.FormatUint(epoch, 10))...)
		}
	}
	return nil
}
