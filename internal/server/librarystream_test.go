package server

import (
	"encoding/binary"
	"io"
	"testing"

	"google.golang.org/grpc/encoding"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// libraryCounts are sums over all connections.
type libraryCounts struct {
	unsent  int64  // counted as not sent
	waiting int    // streams whose sender waits for room
	sent    uint64 // bytes of data
}

func (h *harness) libraryCounts() (n libraryCounts) {
	h.connections.mu.Lock()
	defer h.connections.mu.Unlock()
	for c := range h.connections.all {
		c.mu.Lock()
		if in := c.inbound; in != nil {
			n.unsent += in.unsent
			n.sent += in.sent.dataBytes
			for _, m := range in.open {
				if m.library != nil && m.library.waits {
					n.waiting++
				}
			}
		}
		c.mu.Unlock()
	}
	return n
}

// startPipelines serves so many pipelines whose client has no window, and sends requests for one value on each of them.
func startPipelines(t *testing.T, streams, gets, size int) (h *harness, c *rawClient) {
	t.Helper()
	h = mustStart(t, func(c *config.Config) { c.Transport, c.Limits.InflightBytes = config.TransportGRPC, 64*config.MiB })
	h.put(t, "k", string(make([]byte, size)))
	c = h.dialRaw(t)
	c.send(frame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0})) // SETTINGS_INITIAL_WINDOW_SIZE
	go func() { _, _ = io.Copy(io.Discard, c) }()
	get := encodedRequest(t, &pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte("k")}}})
	for i := range streams {
		c.begin(streamID(i), "/epochkv.v1.KVService/Pipeline", "100S")
		for range gets {
			c.send(frame(frameData, 0, streamID(i), get))
		}
	}
	eventually(t, "all streams wait", func() bool { return h.libraryCounts().waiting == streams })
	return h, c
}

func streamID(i int) uint32 { return uint32(2*i + 1) }

func encodedRequest(t *testing.T, m *pb.PipelineRequest) []byte {
	t.Helper()
	b, err := m.MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}

// open lets the server send all that it has for the streams.
func (c *rawClient) open(streams int) {
	c.send(windowOf(0, 1<<30))
	for i := range streams {
		c.send(windowOf(streamID(i), 1<<30))
	}
}

// TestAByteOfAnAnswerTakesNoMessages: messages that wait in the gRPC library for their handler count until it has them, however often the client takes a
// byte of what the handler sent before.
func TestAByteOfAnAnswerTakesNoMessages(t *testing.T) {
	const streams, rounds, size = 4, 5, 30 << 10
	h, c := startPipelines(t, streams, 40, 4000)
	put := encodedRequest(t, &pb.PipelineRequest{Id: 2, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("p"), Value: make([]byte, size)}}})
	before := h.libraryCounts().sent // on other connections
	for round := range rounds {
		for i := range streams {
			for b := put; len(b) > 0; {
				n := min(len(b), 16<<10)
				c.send(frame(frameData, 0, streamID(i), b[:n]))
				b = b[n:]
			}
			c.send(windowOf(streamID(i), 1))
		}
		eventually(t, "a byte of each stream is sent", func() bool { return h.libraryCounts().sent >= before+uint64(streams*(round+1)) })
		if got := h.receiving.small.reserved.Load(); got < int64(streams*(round+1)*size) {
			t.Fatalf("%d bytes are reserved for %d messages on each stream", got, round+1)
		}
	}
	c.open(streams)
	eventually(t, "all is taken and sent", func() bool { return h.receiving.small.reserved.Load() == 0 && h.libraryCounts().unsent == 0 })
}

// TestSmallAnswersThatAreNotTakenAreFew: the streams of a connection whose client takes nothing have up to 64 KiB of small answers, with what the
// library takes for each, and then 4 KiB and one answer each.
func TestSmallAnswersThatAreNotTakenAreFew(t *testing.T) {
	const streams, most = 32, 4100 + unsentMessage // of an answer
	for _, size := range []int{0, 4000} {
		gets := 30 + (4000-size)/10
		h, c := startPipelines(t, streams, gets, size)
		if got := h.libraryCounts().unsent; got < unsentMax || got > unsentMax+streams*(unsentLeast+most) {
			t.Errorf("values of %d: %d bytes are not sent", size, got)
		}
		c.open(streams)
		eventually(t, "all answers are sent", func() bool {
			n := h.libraryCounts()
			return n.unsent == 0 && n.waiting == 0 && n.sent >= uint64(streams*gets*(size+grpcPrefixBytes))
		})
	}
}

// TestAStreamThatIsResetHasNothingUnsent: what it did not send does not make the other streams of its connection wait.
func TestAStreamThatIsResetHasNothingUnsent(t *testing.T) {
	const streams = 8
	h, c := startPipelines(t, streams, 100, 4000)
	for i := range streams {
		c.send(frame(frameReset, 0, streamID(i), []byte{0, 0, 0, 8})) // CANCEL
	}
	eventually(t, "nothing is unsent", func() bool { n := h.libraryCounts(); return n.unsent == 0 && n.waiting == 0 })
}

// TestNoMessagesAreCompressed: counts of what the gRPC library receives and sends have the encoded bytes, which are those of the frames without a
// compressor. A package that registers one, such as encoding/gzip, must not be imported.
func TestNoMessagesAreCompressed(t *testing.T) {
	if encoding.GetCompressor("gzip") != nil {
		t.Error("messages may be compressed: libraryStream would count them wrongly, and senders would wait for ever")
	}
}
