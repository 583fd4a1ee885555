package transport

import (
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// headerTableBytes is the size of the tables that header blocks are compressed with: HTTP/2's default,
// which the server does not change.
const headerTableBytes = 4096

// headers decodes header blocks. The reader role guards it.
type headers struct {
	decoder *hpack.Decoder
	block   []byte // of a header block in several frames
	stream  uint32 // that the block is for; 0 if none continues
	end     bool   // the block's first frame ends the stream
	max     int

	decoded headerList
}

// headerList is a decoded block.
type headerList struct {
	fields  []hpack.HeaderField // regular fields, in order
	size    int                 // as SETTINGS_MAX_HEADER_LIST_SIZE counts
	max     int
	invalid string // what is malformed; empty if nothing is

	method, scheme, path, authority string
	contentType, encoding, timeout  string
	authorization                   string // all fields of that name, with commas
	traceparent                     string // the same
	pseudo                          bool   // there are pseudo header fields
}

func (h *headers) init(maxBytes int) {
	h.max, h.decoded.max = maxBytes, maxBytes
	h.decoder = hpack.NewDecoder(headerTableBytes, func(f hpack.HeaderField) {
		if h.decoded.add(f); h.decoded.tooLarge() {
			h.decoder.SetEmitEnabled(false) // until the end of the block: see forget
		}
	})
	// What is too large ends its request and not the connection. The block bounds a string, whose
	// Huffman code has at least 5 bits a byte.
	h.decoder.SetMaxStringLength(2 * h.blockBytesMax())
}

// blockBytesMax is the largest encoded block. An encoding is rarely larger than what it encodes.
func (h *headers) blockBytesMax() int { return 2*h.max + framePayloadMax }

// decode decodes a complete block.
func (h *headers) decode(block []byte) (*headerList, error) {
	l := &h.decoded
	*l = headerList{fields: l.fields[:0], max: l.max}
	if _, err := h.decoder.Write(block); err != nil {
		return nil, h.failed(err)
	}
	if err := h.decoder.Close(); err != nil {
		return nil, h.failed(err)
	}
	h.forget()
	return l, nil
}

// forget lets the decoder have another block, which is not decoded: it keeps the empty rest of the last one, and with it the input buffer, 32 KiB for
// each connection.
func (h *headers) forget() {
	h.decoder.SetEmitEnabled(false)
	_, _ = h.decoder.Write(blockOfOneField) // does not fail: the block is whole, and changes no table
	_ = h.decoder.Close()
	h.decoder.SetEmitEnabled(true)
}

// blockOfOneField is an entry of the static table.
var blockOfOneField = []byte{hpackStatus200}

// failed is the error of a block that leaves the compression state unknown.
func (*headers) failed(err error) error {
	return connError{code: http2.ErrCodeCompression, text: err.Error()}
}

// tooLarge reports whether the list is larger than the settings allow.
func (l *headerList) tooLarge() bool { return l.size > l.max }

// add takes a field. The decoder calls it.
func (l *headerList) add(f hpack.HeaderField) {
	l.size += int(f.Size())
	if l.tooLarge() || l.invalid != "" {
		return // a field costs nothing more than its decoding
	}
	if strings.HasPrefix(f.Name, ":") {
		l.addPseudo(f)
		return
	}
	switch f.Name {
	case "content-type":
		l.contentType = f.Value
	case "grpc-encoding":
		l.encoding = f.Value
	case "grpc-timeout":
		l.timeout = f.Value
	case "authorization":
		l.authorization = joined(l.authorization, f.Value)
	case "traceparent":
		l.traceparent = joined(l.traceparent, f.Value)
	case "connection", "proxy-connection", "transfer-encoding", "upgrade", "keep-alive":
		l.invalid = "a field of the connection: " + f.Name
	case "te":
		if f.Value != "trailers" {
			l.invalid = "te is not trailers"
		}
	default:
		if !httpguts.ValidHeaderFieldName(f.Name) || strings.ToLower(f.Name) != f.Name {
			l.invalid = "a field name that HTTP/2 does not allow"
		}
	}
	if !httpguts.ValidHeaderFieldValue(f.Value) {
		l.invalid = "a field value that HTTP does not allow"
	}
	l.fields = append(l.fields, f)
}

// joined is a field that has come twice, as HTTP combines such fields.
func joined(before, value string) string {
	if before == "" {
		return value
	}
	return before + ", " + value
}

func (l *headerList) addPseudo(f hpack.HeaderField) {
	var to *string
	switch f.Name {
	case ":method":
		to = &l.method
	case ":scheme":
		to = &l.scheme
	case ":path":
		to = &l.path
	case ":authority":
		to = &l.authority
	default:
		l.invalid = "an unknown pseudo header field"
		return
	}
	switch {
	case len(l.fields) > 0:
		l.invalid = "a pseudo header field after others"
	case *to != "":
		l.invalid = "a pseudo header field twice"
	}
	*to, l.pseudo = f.Value, true
}

// isRequest reports whether the list can begin a request.
func (l *headerList) isRequest() bool {
	return l.invalid == "" && l.method != "" && l.scheme != "" && l.path != ""
}

// isPlain reports whether the request is one that fast methods take: gRPC with its usual codec,
// without compression.
func (l *headerList) isPlain() bool {
	return l.method == "POST" && (l.contentType == "application/grpc" || l.contentType == "application/grpc+proto") &&
		(l.encoding == "" || l.encoding == "identity")
}

// parseTimeout parses a grpc-timeout: at most eight digits and a unit.
func parseTimeout(s string) (d time.Duration, ok bool) {
	const digitsMax = 8
	n := len(s) - 1
	if n < 1 || n > digitsMax {
		return 0, false
	}
	value := int64(0)
	for i := range n {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		value = 10*value + int64(s[i]-'0')
	}
	var unit time.Duration
	switch s[n] {
	case 'n':
		unit = time.Nanosecond
	case 'u':
		unit = time.Microsecond
	case 'm':
		unit = time.Millisecond
	case 'S':
		unit = time.Second
	case 'M':
		unit = time.Minute
	case 'H':
		unit = time.Hour
	default:
		return 0, false
	}
	const hoursMax = int64(1<<63-1) / int64(time.Hour)
	if unit == time.Hour && value > hoursMax {
		return 1<<63 - 1, true
	}
	return time.Duration(value) * unit, true
}
