package transport

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// TestStreamsThatEndUnsentKeepNothing: a client that takes nothing, while a handler writes to it, asks for large answers, or for
// requests that fail, and resets them. What its service no longer counts does not wait for the socket.
func TestStreamsThatEndUnsentKeepNothing(t *testing.T) {
	const requests = 50
	for _, path := range []string{pathLarge, pathDeaf} {
		t.Run(path, func(t *testing.T) {
			s, server, _ := start(t)
			p := silent(t, server, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			p.open(1, pathEndless)
			c := onlyConn(t, server)
			for begun := false; !begun; {
				f, err := p.framer.ReadFrame()
				if err != nil {
					t.Fatal(err)
				}
				_, begun = f.(*http2.MetaHeadersFrame)
			}
			eventually(t, "the handler waits for its window", func() bool { n, _ := c.pendingOfStreams(); return n >= callPendingMax })
			_ = p.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
			c.waitsToBeSent(t)
			for i := range uint32(requests) {
				p.request(2*i+3, path, 1)
			}
			var senders []*stream
			eventually(t, "the answers wait", func() bool {
				c.mu.Lock()
				defer c.mu.Unlock()
				senders = slices.Clone(c.senders)
				return len(senders) > requests
			})
			for i := range uint32(requests) {
				_ = p.framer.WriteRSTStream(2*i+3, http2.ErrCodeCancel)
			}
			eventually(t, "the streams have ended", func() bool { return s.streams.Load() == 1 && s.held.Load() == 0 })
			c.mu.Lock()
			defer c.mu.Unlock()
			kept := 0
			for _, ended := range senders { // the executor of a request may refer to its stream until the next one
				if ended.id != 1 {
					kept += ended.pending.held()
				}
			}
			if len(c.senders) > 1 || kept > 0 {
				t.Errorf("%d streams are in the queue of senders, and those that have ended have %d bytes", len(c.senders), kept)
			}
		})
	}
}

// TestFreeStreamsTakeLittle: a client has had as many streams as it may, with messages in several frames and long fields, and sends a little
// now and then, so that it is not idle.
func TestFreeStreamsTakeLittle(t *testing.T) {
	const streams = 500
	_, server, address := start(t, func(o *Options) {
		o.Streams = streams
		// No check comes meanwhile: one that finds that a slow client was quiet gives back all free streams.
		o.HandshakeTimeout, o.KeepaliveTime, o.KeepaliveTimeout, o.ProgressTimeout = time.Hour, time.Hour, time.Hour, time.Hour
	})
	p := dial(t, address)
	_ = p.framer.WriteWindowUpdate(0, windowMax-firstWindow)
	message := prefixed(3000)
	for i := range uint32(streams) {
		p.open(2*i+1, pathEcho, "authorization", fmt.Sprint(i, strings.Repeat("a", 7000)))
		_ = p.framer.WriteData(2*i+1, false, message[:100])
	}
	go func() {
		for i := range uint32(streams) {
			_ = p.framer.WriteData(2*i+1, true, message[100:])
		}
	}()
	for ended := 0; ended < streams; {
		f, err := p.framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if h, ok := f.(*http2.MetaHeadersFrame); ok && h.StreamEnded() {
			ended++
		}
	}
	c := onlyConn(t, server)
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := 0
	for s := c.free; s != nil; s = s.next {
		kept += 300 + cap(s.message.body) + len(s.authorization)
	}
	if kept > 2*freeBytesMax {
		t.Errorf("the free streams take %d bytes", kept)
	}
	if c.free == nil {
		t.Error("no stream is kept to be used again")
	}
}
