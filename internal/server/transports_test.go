package server

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// exchange is a client of one connection that sends frames as a case says, and notes what comes back
// for each stream.
type exchange struct {
	framer  *http2.Framer
	encoder *hpack.Encoder
	block   bytes.Buffer
}

// open begins a stream for a path of POST requests of gRPC. Fields that are given replace others.
func (x *exchange) open(stream uint32, path string, end bool, fields ...string) {
	all := []string{":method", "POST", ":scheme", "http", ":path", path, ":authority", "test", "content-type", "application/grpc", "te", "trailers"}
	if *usersFlag {
		all = append(all, "authorization", "Bearer "+testUser)
	}
	for i := 0; i < len(fields); i += 2 {
		replaced := false
		for j := 0; j < len(all); j += 2 {
			if all[j] == fields[i] {
				all[j+1], replaced = fields[i+1], true
			}
		}
		if !replaced {
			all = append(all, fields[i], fields[i+1])
		}
	}
	x.block.Reset()
	for i := 0; i < len(all); i += 2 {
		if all[i+1] != "" {
			_ = x.encoder.WriteField(hpack.HeaderField{Name: all[i], Value: all[i+1]})
		}
	}
	_ = x.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: x.block.Bytes(), EndHeaders: true, EndStream: end})
}

func (x *exchange) data(stream uint32, end bool, b []byte) { _ = x.framer.WriteData(stream, end, b) }

// outcomeOf reads until the stream has ended: its HTTP status, grpc-status and count of messages.
func (x *exchange) outcomeOf(t *testing.T, stream uint32) (outcome string) {
	t.Helper()
	http, grpcStatus, body := "", "no status", 0
	for {
		f, err := x.framer.ReadFrame()
		if err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				return "no answer"
			}
			return "closed"
		}
		ended := false
		switch f := f.(type) {
		case *http2.GoAwayFrame:
			return "GOAWAY"
		case *http2.RSTStreamFrame:
			if f.StreamID == stream {
				return "RST " + f.ErrCode.String()
			}
		case *http2.DataFrame:
			if f.StreamID == stream {
				body += len(f.Data())
				ended = f.StreamEnded()
			}
		case *http2.MetaHeadersFrame:
			if f.StreamID != stream {
				continue
			}
			for _, h := range f.Fields {
				switch h.Name {
				case ":status":
					http = h.Value
				case "grpc-status":
					grpcStatus = h.Value
				}
			}
			ended = f.StreamEnded()
		}
		if ended {
			messages := " without a message"
			if body > 0 && grpcStatus != "no status" {
				messages = " with messages"
			}
			return http + " " + grpcStatus + messages
		}
	}
}

func grpcMessage(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}

// transportCases are requests of stream 1. Differs says why the transports may answer differently.
func transportCases(t *testing.T) map[string]struct {
	send    func(x *exchange)
	differs string
} {
	get := grpcMessage(t, &pb.GetRequest{Key: []byte("k")})
	put := grpcMessage(t, &pb.PutRequest{Key: []byte("k"), Value: []byte("v")})
	empty := grpcMessage(t, &pb.PutRequest{})
	pipelined := grpcMessage(t, &pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte("k")}}})
	const getPath, putPath, scanPath, pipelinePath = "/epochkv.v1.KVService/Get", "/epochkv.v1.KVService/Put", "/epochkv.v1.KVService/Scan", "/epochkv.v1.KVService/Pipeline"
	flagged := func(flag byte, b []byte) []byte {
		b = bytes.Clone(b)
		b[0] = flag
		return b
	}
	whole := func(path string, message []byte, fields ...string) func(x *exchange) {
		return func(x *exchange) {
			x.open(1, path, false, fields...)
			x.data(1, true, message)
		}
	}
	type c = struct {
		send    func(x *exchange)
		differs string
	}
	return map[string]c{
		"get":                           {send: whole(getPath, get)},
		"put":                           {send: whole(putPath, put)},
		"put without a key":             {send: whole(putPath, empty)},
		"a message that is no message":  {send: whole(putPath, []byte{0, 0, 0, 0, 2, 0xff, 0xff})},
		"+proto":                        {send: whole(getPath, get, "content-type", "application/grpc+proto")},
		"content-type with parameters":  {send: whole(getPath, get, "content-type", "application/grpc;charset=utf-8")},
		"an unknown codec":              {send: whole(getPath, get, "content-type", "application/grpc+json")},
		"metadata":                      {send: whole(getPath, get, "some", "thing", "other-bin", "AAEC")},
		"metadata that is too large":    {whole(getPath, get, "large", strings.Repeat("l", 15_000)), "grpc-go ends the connection, the direct transport the request"},
		"metadata that is not base64":   {whole(getPath, get, "other-bin", "!"), "the direct transport does not decode metadata that no method reads"},
		"no te":                         {send: whole(getPath, get, "te", "")},
		"no authority":                  {whole(getPath, get, ":authority", ""), "RFC 9113 allows it; grpc-go answers 13"},
		"identity":                      {send: whole(getPath, get, "grpc-encoding", "identity")},
		"gzip":                          {send: whole(putPath, flagged(1, put), "grpc-encoding", "gzip")},
		"gzip not used":                 {send: whole(putPath, put, "grpc-encoding", "gzip")},
		"compressed without encoding":   {send: whole(putPath, flagged(1, put))},
		"a flag that does not exist":    {send: whole(putPath, flagged(2, put))},
		"an unknown encoding":           {send: whole(putPath, flagged(1, put), "grpc-encoding", "secret")},
		"an unknown method":             {send: whole("/epochkv.v1.KVService/Nothing", get)},
		"an unknown service":            {send: whole("/nothing.v1.KVService/Get", get)},
		"a malformed path":              {send: whole("Get", get)},
		"a wrong content-type":          {send: whole(getPath, get, "content-type", "text/plain")},
		"no content-type":               {send: whole(getPath, get, "content-type", "")},
		"GET":                           {send: whole(getPath, get, ":method", "GET")},
		"a timeout":                     {send: whole(getPath, get, "grpc-timeout", "10S")},
		"a timeout of nothing":          {send: whole(getPath, get, "grpc-timeout", "1n")},
		"a malformed timeout":           {send: whole(getPath, get, "grpc-timeout", "10x")},
		"a malformed timeout of a scan": {send: whole(scanPath, grpcMessage(t, &pb.ScanRequest{}), "grpc-timeout", "10x")},
		"no message":                    {send: func(x *exchange) { x.open(1, getPath, true) }},
		"an empty body": {send: func(x *exchange) {
			x.open(1, getPath, false)
			x.data(1, true, nil)
		}},
		"half a message": {send: whole(getPath, get[:len(get)-1])},
		"half a prefix":  {send: whole(getPath, get[:3])},
		"two messages":   {send: whole(getPath, append(bytes.Clone(get), get...))},
		"a message above the limit": {send: func(x *exchange) {
			x.open(1, putPath, false)
			x.data(1, false, []byte{0, 0x7f, 0xff, 0xff, 0xff, 1, 2, 3})
		}},
		"a message in parts": {send: func(x *exchange) {
			x.open(1, getPath, false)
			for i := range get {
				x.data(1, false, get[i:i+1])
			}
			x.data(1, true, nil)
		}},
		"a message without an end": {send: func(x *exchange) {
			x.open(1, getPath, false, "grpc-timeout", "200m")
			x.data(1, false, get)
		}},
		"half a message before the deadline": {send: func(x *exchange) {
			x.open(1, getPath, false, "grpc-timeout", "200m")
			x.data(1, false, get[:6])
		}},
		"scan":                     {send: whole(scanPath, grpcMessage(t, &pb.ScanRequest{}))},
		"scan without a message":   {send: func(x *exchange) { x.open(1, scanPath, true) }},
		"scan with two messages":   {send: whole(scanPath, append(grpcMessage(t, &pb.ScanRequest{}), grpcMessage(t, &pb.ScanRequest{})...))},
		"pipeline":                 {send: whole(pipelinePath, append(bytes.Clone(pipelined), pipelined...))},
		"pipeline of nothing":      {send: func(x *exchange) { x.open(1, pipelinePath, true) }},
		"pipeline with half":       {send: whole(pipelinePath, append(bytes.Clone(pipelined), pipelined[:7]...))},
		"pipeline with a flag":     {send: whole(pipelinePath, append(bytes.Clone(pipelined), flagged(1, pipelined)...))},
		"pipeline with no message": {send: whole(pipelinePath, append(bytes.Clone(pipelined), 0, 0, 0, 0, 2, 0xff, 0xff))},
		"pipeline at its deadline": {send: func(x *exchange) {
			x.open(1, pipelinePath, false, "grpc-timeout", "200m")
			x.data(1, false, pipelined)
		}},
		"request trailers": {func(x *exchange) {
			x.open(1, getPath, false)
			x.data(1, false, get)
			x.block.Reset()
			_ = x.encoder.WriteField(hpack.HeaderField{Name: "some", Value: "trailer"})
			_ = x.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: x.block.Bytes(), EndHeaders: true, EndStream: true})
		}, "gRPC has no trailers of requests; grpc-go ends the connection, the direct transport the request"},
		"upper case":                   {send: whole(getPath, get, "Some", "thing")},
		"connection":                   {send: whole(getPath, get, "connection", "close")},
		"admin with two messages":      {send: whole("/epochkv.v1.AdminService/Status", make([]byte, 10))},
		"compressed with two messages": {send: whole(getPath, append(bytes.Clone(get), get...), "grpc-encoding", "gzip")},
		"health":                       {send: whole("/grpc.health.v1.Health/Check", []byte{0, 0, 0, 0, 0})},
		"admin":                        {send: whole("/epochkv.v1.AdminService/Status", []byte{0, 0, 0, 0, 0})},
	}
}

// TestTransportsAnswerAlike sends the same frames to both transports, and compares how the stream
// ends.
func TestTransportsAnswerAlike(t *testing.T) {
	addresses := map[config.Transport]string{}
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		h := mustStart(t, func(c *config.Config) { c.Transport = transport })
		h.put(t, "k", "v")
		addresses[transport] = h.Address()
	}
	for name, c := range transportCases(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := exchangeWith(t, addresses[config.TransportDirect], c.send)
			other := exchangeWith(t, addresses[config.TransportGRPC], c.send)
			if direct != other && c.differs == "" {
				t.Errorf("direct: %s\ngrpc-go: %s", direct, other)
			}
			if direct == other && c.differs != "" {
				t.Errorf("the transports answer alike: %s; expected a difference: %s", direct, c.differs)
			}
		})
	}
}

// newExchange connects and sends what a connection begins with. The connection ends after a timeout.
func newExchange(t testing.TB, address string, timeout time.Duration) (x *exchange, end func()) {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(timeout))
	x = &exchange{framer: http2.NewFramer(conn, conn)}
	x.framer.AllowIllegalWrites = true
	x.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	x.encoder = hpack.NewEncoder(&x.block)
	_, _ = io.WriteString(conn, http2.ClientPreface)
	_ = x.framer.WriteSettings()
	return x, func() { _ = conn.Close() }
}

func exchangeWith(t *testing.T, address string, send func(x *exchange)) string {
	t.Helper()
	x, end := newExchange(t, address, 10*time.Second)
	defer end()
	send(x)
	outcome := x.outcomeOf(t, 1)
	if outcome == "RST CANCEL" || strings.HasPrefix(outcome, "200 4 ") {
		// grpc-go resets a stream whose deadline has passed, if its handler does not answer before.
		// Clients have the same deadline, and say so by themselves.
		return "deadline"
	}
	return outcome
}
