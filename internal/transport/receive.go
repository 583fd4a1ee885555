package transport

import (
	"context"
	"encoding/binary"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// handle processes a frame. It returns a request to execute if the frame completes one. Its error
// ends the connection.
func (c *Conn) handle(f frame) (execution, error) {
	c.reads.Add(1)
	if !c.handshaken && f.kind != http2.FrameSettings {
		return execution{}, protocolError("the first frame is not SETTINGS")
	}
	if c.headers.stream != 0 && f.kind != http2.FrameContinuation {
		return execution{}, protocolError("a header block is interrupted")
	}
	switch f.kind {
	case http2.FrameData:
		return c.handleData(f)
	case http2.FrameHeaders:
		return execution{}, c.handleHeaders(f)
	case http2.FrameContinuation:
		return execution{}, c.handleContinuation(f)
	}
	if c.floods() {
		return execution{}, excess(floodOf(f.kind), "too many control frames")
	}
	switch f.kind {
	case http2.FrameSettings:
		return execution{}, c.handleSettings(f)
	case http2.FramePing:
		return execution{}, c.handlePing(f)
	case http2.FrameRSTStream:
		return execution{}, c.handleReset(f)
	case http2.FrameWindowUpdate:
		return execution{}, c.handleWindow(f)
	case http2.FramePushPromise:
		return execution{}, protocolError("a client pushes")
	case http2.FramePriority:
		return execution{}, c.handlePriority(f)
	case http2.FrameGoAway:
		return execution{}, c.handleGoAway(f)
	}
	return execution{}, nil // unknown kinds are allowed
}

// unpad removes the padding of a payload.
func unpad(f frame, padded http2.Flags) ([]byte, error) {
	if f.flags&padded == 0 {
		return f.payload, nil
	}
	if len(f.payload) == 0 || int(f.payload[0]) >= len(f.payload) {
		return nil, protocolError("more padding than payload")
	}
	return f.payload[1 : len(f.payload)-int(f.payload[0])], nil
}

func (c *Conn) handleData(f frame) (w execution, err error) {
	payload, err := unpad(f, http2.FlagDataPadded)
	if err != nil {
		return w, err
	}
	end := f.flags&http2.FlagDataEndStream != 0
	if len(f.payload) > 0 || end {
		c.emptyData = 0
	} else if c.emptyData++; c.emptyData > emptyDataMax {
		return w, excess(ViolationEmptyData, "too many empty frames")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.crowded = len(c.out.buf) >= outMax
	if c.connWindow -= len(f.payload); c.connWindow < 0 {
		return w, connError{code: http2.ErrCodeFlowControl, text: "more than the connection's window"}
	}
	s := c.streams[f.stream]
	switch {
	case s == nil:
		c.takenLocked(len(f.payload))
		return w, c.checkEndedLocked(f.stream)
	case s.recvEnded:
		c.takenLocked(len(f.payload))
		c.resetLocked(s, http2.ErrCodeStreamClosed)
		return w, nil
	}
	if s.recvWindow -= len(f.payload); s.recvWindow < 0 {
		c.takenLocked(len(f.payload))
		c.resetLocked(s, http2.ErrCodeFlowControl)
		return w, nil
	}
	s.recvEnded = end
	s.progressLocked(len(payload))
	if s.call != nil {
		c.takenLocked(len(f.payload) - len(payload)) // padding is not handed on
		c.widenLocked(s, len(f.payload)-len(payload))
		s.call.arrivedLocked(payload)
		return w, nil
	}
	if s.messages != nil {
		c.takenLocked(len(f.payload) - len(payload))
		c.widenLocked(s, len(f.payload)-len(payload))
		return c.messagesLocked(s, payload), nil
	}
	c.takenLocked(len(f.payload))
	message, st := c.receive(s, payload, end)
	switch {
	case st != nil:
		c.failLocked(s, st)
	case message != nil:
		w = execution{request: Request{conn: c, stream: s, id: s.id}, message: message, reserved: s.message.reserved}
		s.message.reserved = 0
		if cap(s.message.body) > freeBytesMax {
			s.message.body = nil // which would be in memory until the answer is sent, and is not used again
		}
	case !end:
		c.widenLocked(s, len(f.payload))
	}
	return w, nil
}

// takenLocked counts bytes that no window holds any more, and tells the client now and then.
func (c *Conn) takenLocked(bytes int) {
	c.untaken += bytes
	if c.untaken >= c.server.options.ConnWindow/4 {
		c.out.buf = appendWindow(c.out.buf, 0, c.untaken)
		c.connWindow += c.untaken
		c.untaken = 0
	}
}

// widenLocked lets the client send as many bytes again on a stream as were taken.
func (c *Conn) widenLocked(s *stream, taken int) {
	s.untaken += taken
	if s.untaken >= c.server.options.StreamWindow/4 && !s.recvEnded && !s.gone {
		c.out.buf = appendWindow(c.out.buf, s.id, s.untaken)
		s.recvWindow += s.untaken
		s.untaken = 0
	}
}

// checkEndedLocked is the error of a frame for a stream that is not open, unless it may still be on
// its way since the stream has ended.
func (c *Conn) checkEndedLocked(stream uint32) error {
	switch {
	case stream == 0:
		return protocolError("a frame of a stream without its number")
	case stream%2 == 0 || stream > c.lastStream:
		return protocolError("a frame of a stream that was not opened")
	}
	return nil
}

// resetLocked ends a stream with RST_STREAM.
func (c *Conn) resetLocked(s *stream, code http2.ErrCode) {
	c.out.buf = AppendReset(c.out.buf, s.id, code)
	c.cancelStreamLocked(s, context.Canceled)
}

func (c *Conn) handleHeaders(f frame) error {
	payload, err := unpad(f, http2.FlagHeadersPadded)
	if err != nil {
		return err
	}
	if f.stream%2 == 0 {
		return protocolError("a client's streams have odd numbers")
	}
	if f.flags&http2.FlagHeadersPriority != 0 {
		const priorityBytes = 5
		if len(payload) < priorityBytes {
			return errPrioritySize
		}
		payload = payload[priorityBytes:]
	}
	end := f.flags&http2.FlagHeadersEndStream != 0
	if f.flags&http2.FlagHeadersEndHeaders == 0 {
		c.headers.stream, c.headers.end, c.headers.block = f.stream, end, append(c.headers.block[:0], payload...)
		return nil
	}
	return c.handleBlock(f.stream, payload, end)
}

func (c *Conn) handleContinuation(f frame) error {
	h := &c.headers
	if h.stream == 0 || f.stream != h.stream {
		return protocolError("CONTINUATION without a header block")
	}
	if len(h.block)+len(f.payload) > h.blockBytesMax() || len(f.payload) == 0 && f.flags&http2.FlagContinuationEndHeaders == 0 {
		return excess(ViolationContinuation, "a header block without an end")
	}
	h.block = append(h.block, f.payload...)
	if f.flags&http2.FlagContinuationEndHeaders == 0 {
		return nil
	}
	block := h.block
	h.stream, h.block = 0, nil
	return c.handleBlock(f.stream, block, h.end)
}

// handleBlock processes a complete header block: a request, or the trailers of one.
func (c *Conn) handleBlock(id uint32, block []byte, end bool) error {
	l, err := c.headers.decode(block)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.crowded = len(c.out.buf) >= outMax
	if c.ended { // what was read before opens nothing: its end would not come
		return errAllSent
	}
	if s := c.streams[id]; s != nil {
		c.trailersLocked(s, l, end)
		return nil
	}
	if id <= c.lastStream {
		if l.pseudo {
			return protocolError("a request on a stream that is not new")
		}
		c.out.buf = AppendReset(c.out.buf, id, http2.ErrCodeStreamClosed)
		return nil
	}
	c.lastStream = id
	switch {
	case c.goneAway:
		c.out.buf = AppendReset(c.out.buf, id, http2.ErrCodeRefusedStream)
		return nil
	case !l.tooLarge() && !l.isRequest(): // of a list that is too large only the beginning is known
		c.out.buf = AppendReset(c.out.buf, id, http2.ErrCodeProtocol)
		return nil
	case c.open >= c.server.options.Streams, int(c.beside.Load()) >= c.server.options.Streams:
		c.out.buf = AppendReset(c.out.buf, id, http2.ErrCodeRefusedStream)
		return nil
	}
	s := c.newStreamLocked(id)
	s.recvEnded = end
	if l.tooLarge() {
		c.client.HeadersRefused(l.size)
		c.refuseLocked(s, ErrMetadata)
		return nil
	}
	c.openLocked(s, l)
	return nil
}

// refuseLocked answers a request that OpenStream does not count.
func (c *Conn) refuseLocked(s *stream, err error) {
	s.uncounted = true
	c.failLocked(s, c.client.Status(err))
}

// trailersLocked processes a header block of an open stream.
func (c *Conn) trailersLocked(s *stream, l *headerList, end bool) {
	switch {
	case s.recvEnded:
		c.resetLocked(s, http2.ErrCodeStreamClosed)
	case !end || l.pseudo || l.invalid != "":
		c.resetLocked(s, http2.ErrCodeProtocol)
	case s.call != nil:
		s.recvEnded = true
		s.call.changedLocked()
	case s.messages != nil:
		s.recvEnded = true
		c.resumeLocked(s)
	default: // gRPC clients have no trailers; the message must have been complete before
		c.failLocked(s, status.New(codes.Internal, "the request ended before its message"))
	}
}

// openLocked opens a stream for a request.
func (c *Conn) openLocked(s *stream, l *headerList) {
	s.authorization, s.traceparent = l.authorization, l.traceparent
	if err := c.client.OpenStream(l.path, l.authorization); err != nil {
		c.refuseLocked(s, err)
		return
	}
	c.open++
	if l.isPlain() {
		s.fast = c.client.Fast(l.path)
	}
	if !c.deadlineLocked(s, l.timeout) {
		return
	}
	if s.fast == 0 {
		c.callLocked(s, l)
		return
	}
	service, err := c.client.Messages(Request{conn: c, stream: s, id: s.id})
	switch {
	case err != nil:
		c.failLocked(s, c.client.Status(err))
	case service != nil:
		s.messages = &messages{service: service}
		c.resumeLocked(s)
	case s.recvEnded:
		c.failLocked(s, status.New(codes.Internal, "the request ended before its message"))
	}
}

func (c *Conn) handleSettings(f frame) error {
	const settingBytes = 6
	switch {
	case f.stream != 0:
		return protocolError("SETTINGS of a stream")
	case f.flags&http2.FlagSettingsAck != 0:
		if len(f.payload) > 0 {
			return connError{code: http2.ErrCodeFrameSize, text: "SETTINGS ACK with a payload"}
		}
		if !c.handshaken {
			return protocolError("the first frame is not SETTINGS")
		}
		return nil
	case len(f.payload)%settingBytes != 0:
		return connError{code: http2.ErrCodeFrameSize, text: "SETTINGS of a wrong length"}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handshaken = true
	c.liveness.handshaken = true
	window := c.streamWindow
	for b := f.payload; len(b) > 0; b = b[settingBytes:] {
		id, value := http2.SettingID(binary.BigEndian.Uint16(b)), binary.BigEndian.Uint32(b[2:])
		if err := c.setLocked(id, value, &window); err != nil {
			return err
		}
	}
	if err := c.setStreamWindowLocked(window); err != nil {
		return err
	}
	c.out.buf = AppendFrameHeader(c.out.buf, 0, http2.FrameSettings, http2.FlagSettingsAck, 0)
	return nil
}

// setLocked follows a setting. The first window of streams is left to the caller, because each
// change of it costs a look at every stream.
func (c *Conn) setLocked(id http2.SettingID, value uint32, window *int) error {
	switch id {
	case http2.SettingHeaderTableSize:
		c.encoder.setTableSize(value)
	case http2.SettingEnablePush:
		if value > 1 {
			return protocolError("ENABLE_PUSH is 0 or 1")
		}
	case http2.SettingInitialWindowSize:
		if value > windowMax {
			return connError{code: http2.ErrCodeFlowControl, text: "INITIAL_WINDOW_SIZE is above 2^31-1"}
		}
		*window = int(value)
	case http2.SettingMaxFrameSize:
		if value < framePayloadMax || value > 1<<24-1 {
			return protocolError("MAX_FRAME_SIZE is out of its range")
		}
	}
	return nil
}

// setStreamWindowLocked changes the first window of streams, and those of open streams as much.
func (c *Conn) setStreamWindowLocked(window int) error {
	change := window - c.streamWindow
	if change == 0 {
		return nil
	}
	c.streamWindow = window
	for _, s := range c.streams {
		if s.sendWindow += change; s.sendWindow > windowMax {
			return connError{code: http2.ErrCodeFlowControl, text: "a window is above 2^31-1"}
		}
		c.queueLocked(s)
	}
	return nil
}

func (c *Conn) handlePing(f frame) error {
	const pingBytes = 8
	switch {
	case len(f.payload) != pingBytes:
		return connError{code: http2.ErrCodeFrameSize, text: "PING of a wrong length"}
	case f.stream != 0:
		return protocolError("PING of a stream")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.flags&http2.FlagPingAck != 0 {
		if binary.BigEndian.Uint64(f.payload) == drainPing {
			c.goAwayLocked()
		}
		return nil
	}
	if !c.liveness.allowsPing(time.Now(), c.server.options.PingInterval) {
		return excess(ViolationPing, "too_many_pings") // the text that gRPC clients know
	}
	c.out.buf = AppendFrameHeader(c.out.buf, pingBytes, http2.FramePing, http2.FlagPingAck, 0)
	c.out.buf = append(c.out.buf, f.payload...)
	return nil
}

func (c *Conn) handleReset(f frame) error {
	if len(f.payload) != 4 {
		return connError{code: http2.ErrCodeFrameSize, text: "RST_STREAM of a wrong length"}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[f.stream]
	if s == nil {
		return c.checkEndedLocked(f.stream)
	}
	c.cancelStreamLocked(s, context.Canceled)
	return nil
}

func (c *Conn) handleWindow(f frame) error {
	if len(f.payload) != 4 {
		return connError{code: http2.ErrCodeFrameSize, text: "WINDOW_UPDATE of a wrong length"}
	}
	increment := int(binary.BigEndian.Uint32(f.payload) & windowMax)
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.stream == 0 {
		if increment == 0 {
			return protocolError("WINDOW_UPDATE of nothing")
		}
		if c.sendWindow += increment; c.sendWindow > windowMax {
			return connError{code: http2.ErrCodeFlowControl, text: "the connection's window is above 2^31-1"}
		}
		return nil // the end of the burst sends what the window allows now
	}
	s := c.streams[f.stream]
	switch {
	case s == nil:
		return c.checkEndedLocked(f.stream)
	case increment == 0:
		c.resetLocked(s, http2.ErrCodeProtocol)
	case s.sendWindow+increment > windowMax:
		c.resetLocked(s, http2.ErrCodeFlowControl)
	default:
		s.sendWindow += increment
		c.queueLocked(s)
	}
	return nil
}

// handleGoAway: a client that opens no more streams closes the connection when it has its answers.
func (*Conn) handleGoAway(f frame) error {
	const goAwayBytes = 8
	switch {
	case f.stream != 0:
		return protocolError("GOAWAY of a stream")
	case len(f.payload) < goAwayBytes:
		return connError{code: http2.ErrCodeFrameSize, text: "GOAWAY of a wrong length"}
	}
	return nil
}

// errPrioritySize: a priority is shorter than it must be.
var errPrioritySize = connError{code: http2.ErrCodeFrameSize, text: "a priority of a wrong length"}

func (*Conn) handlePriority(f frame) error {
	switch {
	case f.stream == 0:
		return protocolError("PRIORITY without a stream")
	case len(f.payload) != 5:
		return errPrioritySize
	}
	return nil
}
