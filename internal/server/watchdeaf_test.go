package server

import (
	"io"
	"slices"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// padded is a message with a field of so many bytes that the server does not know.
func padded[M proto.Message](m M, bytes int) M {
	m.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 1000, protowire.BytesType), make([]byte, bytes)))
	return m
}

// deafWatchAtItsWindow is a client of a watch whose sender waits for it: it has the events that its window takes, and takes no more.
func (h *harness) deafWatchAtItsWindow(t *testing.T, prefix string) *rawClient {
	t.Helper()
	e := h.put(t, prefix, "")
	for range 4 {
		h.put(t, prefix, string(make([]byte, 60<<10)))
	}
	c := h.dialRaw(t)
	c.begin(1, pb.FeedService_Watch_FullMethodName, "120S")
	c.sendWhole(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{
		Ranges: []*pb.KeyRange{prefixRange(prefix)}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1},
	}}})
	_ = c.SetReadDeadline(time.Now().Add(patience))
	framer := http2.NewFramer(io.Discard, c.Conn)
	for taken := 0; taken < connWindowFirst; {
		f, err := framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		c.noteWindow(f)
		if d, ok := f.(*http2.DataFrame); ok {
			taken += len(d.Data())
		}
	}
	return c
}

func progressRequest() *pb.WatchRequest {
	return &pb.WatchRequest{Request: &pb.WatchRequest_Progress{Progress: &pb.RequestProgress{}}}
}

// TestADeafWatchKeepsNoRoomOfMessages: a request that waits for a sender, which waits for its client, counts in the share of watches alone.
func TestADeafWatchKeepsNoRoomOfMessages(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		const size = 400 << 10
		h := mustStart(t, with)
		c := h.deafWatchAtItsWindow(t, "w")
		c.sendWhole(padded(progressRequest(), size))
		watches := &h.admission.words[shareWatches]
		eventually(t, "its request counts in the share of watches", func() bool { return watches.word.Load()&admissionBytes >= size })
		eventually(t, "it keeps no room of messages", func() bool { return h.receiving.reserved() == 0 })
		if n := h.feed.streams.Load(); n != 1 {
			t.Errorf("%d streams are left", n)
		}
	})
}

// TestARequestThatIsTakenAtOnceKeepsNoRoomOfMessages although the share of watches had none for it, and its stream sends nothing afterwards.
func TestARequestThatIsTakenAtOnceKeepsNoRoomOfMessages(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		held := h.fillWatches()
		defer held.leave()
		c := h.dialRaw(t)
		c.begin(1, pb.FeedService_Watch_FullMethodName, "120S")
		for i := range 8 { // each is more than the windows: the server counts it before all of it is sent
			c.sendWhole(padded(&pb.WatchRequest{Request: &pb.WatchRequest_Cancel{Cancel: &pb.CancelWatch{WatchId: uint64(i)}}}, 400<<10))
			eventually(t, "it keeps no room of messages", func() bool { return h.receiving.reserved() == 0 })
		}
		if n := h.admission.refused.Load(); n > 0 {
			t.Errorf("%d requests are refused although the sender waits for nothing", n)
		}
	})
}

// TestARequestThatIsRefusedEndsADeafWatch: it is larger than the codec takes. It leaves the place beside the share, although the end of its stream is sent
// after the events, which wait for the client.
func TestARequestThatIsRefusedEndsADeafWatch(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		c := h.deafWatchAtItsWindow(t, "w")
		c.sendWhole(padded(progressRequest(), int(h.receiving.large.limit/2)+1<<20))
		eventually(t, "the place is free", func() bool { return h.receiving.beside.bytes() == 0 })
		eventually(t, "the stream has ended", func() bool { return h.feed.streams.Load() == 0 })
		c.send(slices.Concat(windowOf(0, 1<<20), windowOf(1, 1<<20)))
		c.awaitEnd(1)
	})
}

// TestARequestOfATransactionLeavesThePlaceOfADeafClient, whether it is executed or refused: its answer, or the end of its stream, waits for a client that
// takes nothing of the answer before it.
func TestARequestOfATransactionLeavesThePlaceOfADeafClient(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		h.put(t, "k", string(make([]byte, 200<<10)))
		for name, rest := range map[string][]byte{
			"executed": nil,
			"refused":  protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), []byte{0xff}), // no message
		} {
			last := padded(&pb.TransactRequest{Request: &pb.TransactRequest_Rollback{Rollback: &pb.RollbackRequest{}}}, int(h.receiving.large.limit/2)+1<<20)
			last.ProtoReflect().SetUnknown(append(last.ProtoReflect().GetUnknown(), rest...))
			c := h.dialRaw(t)
			c.begin(1, pb.TransactionService_Transact_FullMethodName, "120S")
			c.sendWhole(
				&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}},
				&pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: []byte("k")}}},
				last,
			)
			eventually(t, "the place is free of one that is "+name, func() bool { return h.receiving.beside.bytes() == 0 })
		}
	})
}

// TestABulkLoadLeavesThePlaceOfAMessageThatWasAdded, and what it counts in the share: the load may go on for hours.
func TestABulkLoadLeavesThePlaceOfAMessageThatWasAdded(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		c := h.dialRaw(t)
		c.begin(1, pb.KVService_BulkLoad_FullMethodName, "120S")
		const smallest = receivedBytesMin - 11 // with which a message is large
		for i, size := range []int{smallest, 1 << 20, int(h.receiving.large.limit/2) + 1<<20} {
			m := &pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte{byte(i)}, Value: make([]byte, size)}}}
			if size == smallest && m.SizeVT() != receivedBytesMin {
				t.Fatalf("the smallest large message has %d bytes", m.SizeVT())
			}
			c.sendWhole(m)
			eventually(t, "nothing is counted", func() bool { return h.receiving.reserved() == 0 && h.receiving.beside.bytes() == 0 })
		}
		c.sendWhole(&pb.BulkLoadRequest{Commit: true})
		c.send(frame(frameData, flagEndStream, 1, nil))
		c.awaitEnd(1)
		if got := len(h.get(t, "\x01").Value); got != 1<<20 {
			t.Errorf("%d bytes are loaded", got)
		}
	})
}
