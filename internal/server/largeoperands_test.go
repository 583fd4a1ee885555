package server

import (
	"bytes"
	"fmt"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestLargeOperandsSurviveTheRequestsAfterThem: a transaction refers to them until it is committed, and answers refer to them, while the messages
// of its stream are used again.
func TestLargeOperandsSurviveTheRequestsAfterThem(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		const n, size = 8, 80 << 10
		value := func(i int) []byte { return bytes.Repeat([]byte{byte('a' + i)}, size) }
		h.put(t, "k2", "old")
		h.put(t, "k6", "old")
		k := h.talk(t)
		k.begin()
		var answers [][]byte
		for i := range n {
			in := &pb.Invocation{Key: fmt.Append(nil, "k", i), ReturnNew: true}
			switch i % 4 {
			case 0:
				in.Operation = &pb.Invocation_GetAndSet{GetAndSet: value(i)}
			case 1:
				in.Operation = &pb.Invocation_PutIfAbsent{PutIfAbsent: value(i)}
			case 2:
				in.Operation = &pb.Invocation_CompareAndSet{CompareAndSet: &pb.CompareAndSet{Expect: []byte("old"), Value: value(i)}}
			case 3:
				in.Operation = &pb.Invocation_Append{Append: value(i)}
			}
			answers = append(answers, k.must(&pb.TransactRequest{Request: &pb.TransactRequest_Invoke{Invoke: in}}).GetInvoke().GetNew())
		}
		k.must(commitRequest)
		for i, answer := range answers {
			if got := h.get(t, fmt.Sprint("k", i)).Value; !bytes.Equal(got, value(i)) || !bytes.Equal(answer, value(i)) {
				t.Errorf("k%d has %d bytes that begin with %.3q, and %d that begin with %.3q were returned", i, len(got), got, len(answer), answer)
			}
		}
	})
}
