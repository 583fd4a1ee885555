package transport

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Message is an answer that encodes itself.
type Message interface {
	SizeVT() int
	MarshalToSizedBufferVT(buf []byte) (int, error)
}

// answerEncoder writes header blocks. Two fields are in the client's table after the first answer
// of a connection, and take a byte each; all others are literals that change no table. The
// connection's mutex guards it.
//
//	table, newest first: grpc-status: 0 | content-type: application/grpc
type answerEncoder struct {
	known   int  // how many of the two are in the table, in the order content-type, grpc-status
	literal bool // the client's table is smaller than the default: everything is a literal
	shrink  bool // the next block begins with the announcement of an empty table
}

const (
	hpackStatus200    = 0x88 // static index 8
	hpackContentType  = 31   // static index of the name
	hpackIncremental  = 0x40 // literal with incremental indexing
	hpackFirstDynamic = 62   // index of the newest entry of the table
	hpackIndexed      = 0x80 // indexed field
	hpackEmptyTable   = 0x20 // table size update to 0
)

// setTableSize follows SETTINGS_HEADER_TABLE_SIZE. The next block must begin with the size of the
// table if that gets smaller, whether the two fields fit or not.
func (e *answerEncoder) setTableSize(size uint32) {
	if size < headerTableBytes && !e.literal {
		e.literal, e.shrink = true, true
	}
}

// begin begins a block.
func (e *answerEncoder) begin(b []byte) []byte {
	if e.shrink {
		e.shrink = false
		return append(b, hpackEmptyTable)
	}
	return b
}

// appendHeaders appends the block that begins an answer.
func (e *answerEncoder) appendHeaders(b []byte) []byte {
	b = append(e.begin(b), hpackStatus200)
	switch {
	case e.literal:
		b = appendContentType(b, 0)
	case e.known == 0:
		b = appendContentType(b, hpackIncremental)
		e.known = 1
	default:
		b = append(b, hpackIndexed|byte(hpackFirstDynamic+e.known-1))
	}
	return b
}

// appendOK appends the block that ends an answer without an error, after appendHeaders.
func (e *answerEncoder) appendOK(b []byte) []byte {
	b = e.begin(b)
	switch {
	case e.literal:
		return appendLiteral(b, "grpc-status", "0")
	case e.known < 2:
		e.known = 2
		b = append(b, hpackIncremental)
		b = appendString(b, "grpc-status")
		return appendString(b, "0")
	}
	return append(b, hpackIndexed|hpackFirstDynamic)
}

// appendStatus appends the fields of a status.
func appendStatus(b []byte, st *status.Status) []byte {
	b = appendLiteral(b, "grpc-status", strconv.Itoa(int(st.Code())))
	b = appendLiteral(b, "grpc-message", percentEncode(st.Message()))
	if p := st.Proto(); len(p.GetDetails()) > 0 {
		if details, err := proto.Marshal(p); err == nil {
			b = appendLiteral(b, "grpc-status-details-bin", base64.RawStdEncoding.EncodeToString(details))
		}
	}
	return b
}

// appendContentType appends the content type as a literal, whose name is an entry of the static table.
func appendContentType(b []byte, kind byte) []byte {
	prefix := 4
	if kind == hpackIncremental {
		prefix = 6
	}
	b = appendInt(b, kind, prefix, hpackContentType)
	return appendString(b, contentTypeGRPC)
}

// appendLiteral appends a literal without indexing.
func appendLiteral(b []byte, name, value string) []byte {
	return appendString(appendString(append(b, 0), name), value)
}

func appendString(b []byte, s string) []byte {
	if n := hpack.HuffmanEncodeLength(s); n < uint64(len(s)) {
		return hpack.AppendHuffmanString(appendInt(b, 0x80, 7, int(n)), s)
	}
	return append(appendInt(b, 0, 7, len(s)), s...)
}

// appendInt appends an HPACK integer with a prefix of so many bits.
func appendInt(b []byte, first byte, prefix, n int) []byte {
	most := 1<<prefix - 1
	if n < most {
		return append(b, first|byte(n))
	}
	b = append(b, first|byte(most))
	for n -= most; n >= 0x80; n >>= 7 {
		b = append(b, byte(n)|0x80)
	}
	return append(b, byte(n))
}

// percentEncode encodes a grpc-message: everything but printable ASCII, and percent signs.
func percentEncode(s string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
		}
	}
	return b.String()
}

// grpcPrefixBytes precede each message: whether it is compressed, and its length.
const grpcPrefixBytes = 5

func putPrefix(b []byte, length int) {
	b[0] = 0
	binary.BigEndian.PutUint32(b[1:], uint32(length))
}

// Request is a fast request that has not been answered.
type Request struct {
	conn   *Conn
	stream *stream // another request's once this one was answered
	id     uint32
}

// Answer sends a message and status OK. Release, which may be nil, is called when the transport
// holds none of the message's bytes any more. Flush sends what Answer has prepared; the lane's
// goroutine flushes by itself. It reports false if no client waits for the answer: the request was
// cancelled, or the connection has ended.
func (r Request) Answer(m Message, release func()) bool {
	c, size := r.conn, m.SizeVT()
	if size > smallAnswerMax {
		return r.answerLarge(m, size, release)
	}
	if release != nil {
		defer release()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := r.stream
	if !r.openLocked() {
		return false
	}
	b := c.answerHeadersLocked(c.out.buf, s)
	inline := grpcPrefixBytes+size <= min(s.sendWindow, c.sendWindow) && len(b) < outMax
	if inline {
		b = AppendFrameHeader(b, grpcPrefixBytes+size, http2.FrameData, 0, s.id)
	}
	from := len(b)
	b = grow(b, grpcPrefixBytes+size)
	putPrefix(b[from:], size)
	if _, err := m.MarshalToSizedBufferVT(b[from+grpcPrefixBytes:]); err != nil {
		c.endLocked(err) // the client would not know what the header block has put into its table
		return false
	}
	if !inline {
		s.pending.push(slices.Clone(b[from:]), nil)
		c.pending += s.pending.bytes
		c.out.buf = b[:from]
		s.last = true
		c.queueLocked(s)
		return true
	}
	s.sendWindow -= grpcPrefixBytes + size
	c.sendWindow -= grpcPrefixBytes + size
	c.out.buf = c.appendEndLocked(b, s)
	c.removeLocked(s)
	return true
}

// smallAnswerMax is the largest answer that is encoded into the output directly.
const smallAnswerMax = 4 << 10

func (r Request) answerLarge(m Message, size int, release func()) bool {
	c, s := r.conn, r.stream
	b := make([]byte, grpcPrefixBytes+size)
	putPrefix(b, size)
	_, err := m.MarshalToSizedBufferVT(b[grpcPrefixBytes:])
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.endLocked(err)
	}
	if !r.openLocked() {
		if release != nil {
			release()
		}
		return false
	}
	c.out.buf = c.answerHeadersLocked(c.out.buf, s)
	s.pending.push(b, release)
	s.last = true
	c.pending += len(b)
	c.queueLocked(s)
	return true
}

// Fail sends a status other than OK. It reports false like Answer. While the output is full, the status stays with its stream, which counts:
// all requests of a connection may have waited for one sync.
func (r Request) Fail(st *status.Status) bool {
	c := r.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if !r.openLocked() {
		return false
	}
	if len(c.out.buf) < outMax {
		c.failLocked(r.stream, st)
	} else {
		c.endWithLocked(r.stream, st, nil)
		c.queueLocked(r.stream)
	}
	return true
}

// endWithLocked ends a stream with a status and metadata, after what it has to send. Without headers it is one block.
func (c *Conn) endWithLocked(s *stream, st *status.Status, md metadata.MD) {
	block := []byte{}
	if !s.answered {
		s.answered, c.liveness.answered = true, true
		block = append(block, hpackStatus200)
		block = appendContentType(block, 0)
	}
	s.trailers, s.last = appendMetadata(appendStatus(block, st), md), true
}

// Flush sends what has been prepared, unless another goroutine does so. It may wait for the client.
func (r Request) Flush() { r.conn.flush() }

// FlushAside is Flush in a goroutine of its own, for what serves other clients, too.
func (r Request) FlushAside() {
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	r.conn.flushAsideLocked()
}

// Ended reports whether nothing can be answered any more.
func (r Request) Ended() bool {
	c := r.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	return !r.openLocked() && (r.stream.messages == nil || !r.streamsLocked())
}

// openLocked reports whether the request can be answered.
func (r Request) openLocked() bool {
	s := r.stream
	return s.id == r.id && !s.gone && !s.answered && !r.conn.ended
}

func grow(b []byte, n int) []byte {
	if cap(b)-len(b) >= n {
		return b[:len(b)+n]
	}
	return append(b, make([]byte, n)...)
}

// answerHeadersLocked begins the answer of a stream.
func (c *Conn) answerHeadersLocked(b []byte, s *stream) []byte {
	s.answered = true
	c.liveness.answered = true
	from := len(b)
	b = AppendFrameHeader(b, 0, http2.FrameHeaders, http2.FlagHeadersEndHeaders, s.id)
	b = c.encoder.appendHeaders(b)
	return setLength(b, from)
}

// appendEndLocked ends the answer of a stream with status OK.
func (c *Conn) appendEndLocked(b []byte, s *stream) []byte {
	from := len(b)
	b = AppendFrameHeader(b, 0, http2.FrameHeaders, http2.FlagHeadersEndHeaders|http2.FlagHeadersEndStream, s.id)
	b = c.encoder.appendOK(b)
	return setLength(b, from)
}

// setLength sets the length of the frame that begins at from, which must be its only frame.
func setLength(b []byte, from int) []byte {
	n := len(b) - from - frameHeaderBytes
	b[from], b[from+1], b[from+2] = byte(n>>16), byte(n>>8), byte(n)
	return b
}

// failLocked ends a stream with a status, and drops what it had to send.
func (c *Conn) failLocked(s *stream, st *status.Status) {
	trailersOnly := !s.answered
	s.answered = true
	block := c.encoder.begin(nil)
	if trailersOnly {
		block = append(block, hpackStatus200)
		block = appendContentType(block, 0)
	}
	c.sendBlockLocked(s, appendStatus(block, st), true)
	if s.messages != nil {
		s.cancelLocked(context.Canceled)
		c.client.Cancelled(Request{conn: c, stream: s, id: s.id})
	}
	c.removeLocked(s)
}

// sendBlockLocked sends a header block, in several frames if it is large.
func (c *Conn) sendBlockLocked(s *stream, block []byte, end bool) {
	kind, flags := http2.FrameHeaders, http2.Flags(0)
	if end {
		flags = http2.FlagHeadersEndStream
	}
	for {
		n := min(len(block), c.framePayload)
		if n == len(block) {
			flags |= http2.FlagHeadersEndHeaders
		}
		c.out.buf = AppendFrameHeader(c.out.buf, n, kind, flags, s.id)
		c.out.buf = append(c.out.buf, block[:n]...)
		if block = block[n:]; flags&http2.FlagHeadersEndHeaders != 0 {
			return
		}
		kind, flags = http2.FrameContinuation, 0
	}
}
