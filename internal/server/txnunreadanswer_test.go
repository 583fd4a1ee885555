package server

import (
	"encoding/binary"
	"io"
	"runtime"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// sendWhole sends messages on stream 1 as the server's windows allow it.
func (c *rawClient) sendWhole(messages ...proto.Message) {
	c.t.Helper()
	var b []byte
	for _, m := range messages {
		encoded, err := proto.Marshal(m)
		if err != nil {
			c.t.Fatal(err)
		}
		b = append(append(b, binary.BigEndian.AppendUint32([]byte{0}, uint32(len(encoded)))...), encoded...)
	}
	if c.windows == nil {
		c.windows = map[uint32]int{0: connWindowFirst, 1: streamWindowBytes}
	}
	framer := http2.NewFramer(io.Discard, c.Conn)
	for len(b) > 0 {
		n := min(len(b), 16<<10, c.windows[0], c.windows[1])
		if n > 0 {
			c.send(frame(frameData, 0, 1, b[:n]))
			c.windows[0], c.windows[1], b = c.windows[0]-n, c.windows[1]-n, b[n:]
			continue
		}
		f, err := framer.ReadFrame()
		if err != nil {
			c.t.Fatal(err)
		}
		c.noteWindow(f)
	}
}

// noteWindow notes that a frame has widened a window of sendWhole.
func (c *rawClient) noteWindow(f http2.Frame) {
	if w, ok := f.(*http2.WindowUpdateFrame); ok {
		c.windows[w.StreamID] += int(w.Increment)
	}
}

// TestARequestOfATransactionIsDroppedBeforeItsAnswerWaits: the answer to one that is large waits for a client that does not take the answer before it. The
// request neither keeps the place beside the share, nor is in memory: nothing counts it.
func TestARequestOfATransactionIsDroppedBeforeItsAnswerWaits(t *testing.T) {
	testseed.SkipUnderRace(t)
	const clients = 4
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		h.put(t, "k", string(make([]byte, 200<<10)))
		large := int(h.receiving.large.limit/2) + 1<<20
		last := padded(&pb.TransactRequest{Request: &pb.TransactRequest_Rollback{Rollback: &pb.RollbackRequest{}}}, large)
		before := liveHeap()
		for range clients {
			c := h.dialRaw(t)
			c.begin(1, pb.TransactionService_Transact_FullMethodName, "120S")
			c.sendWhole(
				&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}},
				&pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: []byte("k")}}},
				last,
			)
			eventually(t, "the place is free", func() bool {
				c.send(append(windowOf(0, 10), windowOf(1, 10)...)) // little of the answer is taken
				return h.receiving.beside.bytes() == 0
			})
		}
		if more := liveHeap() - before; more > int64(large) {
			t.Errorf("%d clients take %d bytes with requests of %d", clients, more, large)
		}
		runtime.KeepAlive(last)
	})
}
