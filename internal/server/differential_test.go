package server

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/net/http2"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// twoTransports has a server of each transport, with the same contents.
type twoTransports struct {
	direct, other string // addresses
	paths         []string
	messages      [][]byte // of each path, with the prefix
}

func startTransports(t testing.TB) *twoTransports {
	two := &twoTransports{}
	for transport, address := range map[config.Transport]*string{config.TransportDirect: &two.direct, config.TransportGRPC: &two.other} {
		h := mustStart(t, func(c *config.Config) { c.Transport = transport })
		h.put(t, "k", "v")
		*address = h.Address()
	}
	add := func(path string, message []byte) {
		two.paths, two.messages = append(two.paths, path), append(two.messages, message)
	}
	get := &pb.GetRequest{Key: []byte("k")}
	add(pb.KVService_Get_FullMethodName, grpcMessage(t, get))
	add(pb.KVService_Put_FullMethodName, grpcMessage(t, &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Durability: pb.Durability_DURABILITY_ASYNC}))
	add(pb.KVService_Put_FullMethodName, grpcMessage(t, new(pb.PutRequest)))
	add(pb.KVService_BatchGet_FullMethodName, grpcMessage(t, &pb.BatchGetRequest{Keys: [][]byte{[]byte("k"), []byte("none")}}))
	add(pb.KVService_Scan_FullMethodName, grpcMessage(t, new(pb.ScanRequest)))
	add(pb.KVService_Pipeline_FullMethodName, grpcMessage(t, &pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: get}}))
	add(pb.TransactionService_Execute_FullMethodName, grpcMessage(t, new(pb.ExecuteRequest)))
	add(pb.TransactionService_Transact_FullMethodName, grpcMessage(t, &pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: new(pb.BeginRequest)}}))
	add(pb.LeaseService_KeepAlive_FullMethodName, grpcMessage(t, new(pb.KeepAliveRequest)))
	add(pb.AdminService_Status_FullMethodName, grpcMessage(t, new(pb.StatusRequest)))
	add("/grpc.health.v1.Health/Check", []byte{0, 0, 0, 0, 0})
	add("/epochkv.v1.KVService/Nothing", []byte{0, 0, 0, 0, 0})
	return two
}

// fieldsThatMayCome are metadata for which the transports must answer alike; see transportCases for the others.
var fieldsThatMayCome = [][]string{
	nil, nil, nil,
	{"content-type", "application/grpc+proto"},
	{"content-type", "text/plain"},
	{"grpc-encoding", "identity"},
	{"grpc-encoding", "gzip"},
	{"grpc-timeout", "20S"},
	{"grpc-timeout", "20x"},
	{"some", "thing"},
	{"other-bin", "AAEC"},
	{":method", "GET"},
	{"te", ""},
	{"connection", "close"},
	{"Some", "thing"},
}

// script is the bytes that choose what is sent. After its end it is zeros.
type script []byte

func (s *script) next(n int) int {
	if len(*s) == 0 {
		return 0
	}
	c := (*s)[0]
	*s = (*s)[1:]
	return int(c) % n
}

// body is a body of a request that has this message: whole, twice, damaged, or cut.
func (s *script) body(message []byte) []byte {
	b := bytes.Clone(message)
	switch s.next(10) {
	case 1:
		return append(b, message...)
	case 2:
		return b[:s.next(len(b)+1)]
	case 3:
		return append(b, message[:s.next(len(message)+1)]...)
	case 4:
		b[0] = byte(s.next(4))
	case 5:
		// A shorter length would make the rest a message of any length, which is refused for the length with one transport, and as a
		// second message with the other.
		b[4] += byte(s.next(16))
	case 6:
		if len(b) > grpcPrefixBytes {
			b[grpcPrefixBytes+s.next(len(b)-grpcPrefixBytes)] ^= byte(1 + s.next(255))
		}
	case 7:
		return append(b, 0, 0, 0, 0, 2, 0xff, 0xff)
	case 8:
		return nil
	}
	return b
}

// send sends a body in frames, the last of which ends the stream.
func (s *script) send(x *exchange, stream uint32, b []byte) {
	for len(b) > 0 {
		n := len(b)
		if s.next(2) == 1 {
			n = 1 + s.next(n)
		}
		part, last := b[:n], n == len(b)
		b = b[n:]
		switch s.next(6) {
		case 1:
			x.data(stream, false, nil)
		case 2:
			_ = x.framer.WriteWindowUpdate(stream, uint32(1+s.next(100)))
		case 3:
			_ = x.framer.WritePriority(stream, http2.PriorityParam{StreamDep: 0, Weight: 1})
		case 4:
			_ = x.framer.WriteRawFrame(0x77, 0, stream, []byte("unknown"))
		}
		end := last && s.next(3) != 1
		if s.next(4) == 1 {
			_ = x.framer.WriteDataPadded(stream, end, part, make([]byte, s.next(20)))
		} else {
			x.data(stream, end, part)
		}
		if end {
			return
		}
	}
	x.data(stream, true, nil)
}

// play sends what a script says on a connection, several streams of which are open at once, and returns how each ended.
func (two *twoTransports) play(t testing.TB, address string, s script) map[uint32]string {
	x, end := newExchange(t, address, 20*time.Second)
	defer end()
	outcomes := map[uint32]string{}
	last := uint32(0)
	for streams := 1 + s.next(5); streams > 0; streams-- {
		last += 2
		id, which := last-1, s.next(len(two.paths))
		x.open(id, two.paths[which], false, fieldsThatMayCome[s.next(len(fieldsThatMayCome))]...)
		s.send(x, id, s.body(two.messages[which]))
		if s.next(8) == 1 {
			_ = x.framer.WriteRSTStream(id, http2.ErrCodeCancel)
			outcomes[id] = "reset by the client" // whatever has come before
		}
	}
	x.outcomesOf(last/2, outcomes)
	return outcomes
}

// outcomesOf reads until so many streams have ended.
func (x *exchange) outcomesOf(streams uint32, outcomes map[uint32]string) {
	type answer struct {
		http, status string
		body         []byte
	}
	answers := map[uint32]*answer{}
	for uint32(len(outcomes)) < streams {
		f, err := x.framer.ReadFrame()
		if err != nil {
			var timeout net.Error
			outcomes[0] = "closed"
			if errors.As(err, &timeout) && timeout.Timeout() {
				outcomes[0] = "no answer"
			}
			return
		}
		id := f.Header().StreamID
		if outcomes[id] != "" {
			continue // what comes after the end says nothing
		}
		a := answers[id]
		if a == nil {
			a = new(answer)
			answers[id] = a
		}
		ended := false
		switch f := f.(type) {
		case *http2.GoAwayFrame:
			outcomes[0] = "GOAWAY " + f.ErrCode.String()
			return
		case *http2.RSTStreamFrame:
			outcomes[id] = "RST " + f.ErrCode.String()
		case *http2.DataFrame:
			a.body = append(a.body, f.Data()...)
			ended = f.StreamEnded()
		case *http2.MetaHeadersFrame:
			for _, h := range f.Fields {
				switch h.Name {
				case ":status":
					a.http = h.Value
				case "grpc-status":
					a.status = h.Value
				}
			}
			ended = f.StreamEnded()
		}
		if ended {
			outcomes[id] = fmt.Sprintf("HTTP %s, grpc-status %s, %d messages", a.http, a.status, countMessages(a.body))
		}
	}
}

func countMessages(b []byte) (n int) {
	for ; len(b) >= grpcPrefixBytes; n++ {
		length := grpcPrefixBytes + int(b[1])<<24 + int(b[2])<<16 + int(b[3])<<8 + int(b[4])
		b = b[min(length, len(b)):]
	}
	return n
}

func (two *twoTransports) compare(t testing.TB, s script) {
	t.Helper()
	direct, other := two.play(t, two.direct, s), two.play(t, two.other, s)
	if maps.Equal(direct, other) {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(direct)) {
		if direct[id] != other[id] {
			t.Errorf("script %x, stream %d:\ndirect:  %s\ngrpc-go: %s", []byte(s), id, direct[id], other[id])
		}
	}
	if len(direct) != len(other) {
		t.Errorf("script %x:\ndirect:  %v\ngrpc-go: %v", []byte(s), direct, other)
	}
}

// TestGeneratedFramesGetTheSameStatuses sends generated frames to both transports: each stream ends with the same statuses, and as many messages.
func TestGeneratedFramesGetTheSameStatuses(t *testing.T) {
	const scripts = 1000
	two := startTransports(t)
	for seed := range uint64(scripts) {
		random := rand.New(rand.NewPCG(seed, 14))
		s := make(script, 100)
		for i := range s {
			s[i] = byte(random.UintN(256))
		}
		two.compare(t, s)
	}
}

// FuzzTransportsAnswerAlike does the same with what the fuzzer finds.
func FuzzTransportsAnswerAlike(f *testing.F) {
	f.Add([]byte{4, 0, 0, 0, 5, 3, 1, 1, 9, 7, 2, 8})
	f.Add([]byte{2, 5, 0, 7, 1, 2, 3, 4, 7, 0, 3, 9})
	two := startTransports(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		const bytesMax = 1000 // longer scripts say nothing more
		two.compare(t, b[:min(len(b), bytesMax)])
	})
}
