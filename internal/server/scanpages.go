package server

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/transport"
)

// scanPages are the pages of one scan that the transport has, and has not sent yet. A scan may end long before its last page is sent: the
// transport takes a page at once, and its client decides when it goes out. So the room of an ended scan in its share shrinks to these pages, but
// not below what a scan counts at least, and is given back with the last of them, or when its connection ends. They know nothing of their scan: it
// refers to its stream, which refers to the pages that it has, and the cleanup of a page never runs while what it is given refers to the page.
type scanPages struct {
	admission *admission

	mu    sync.Mutex // before the connection's
	bytes int        // of the pages
	ended bool       // the scan has ended; its room in its share is that of conn
	room  int
	conn  *connection
	empty chan struct{} // closed when no page is left; nil: nothing waits for that
}

// pageCountedMin is the size of the smallest page that is counted if it is the only one of its scan. Smaller ones are bounded like other small answers of
// streams.
const pageCountedMin = 8 << 10

// add counts a page of so many bytes until it is sent.
func (p *scanPages) add(bytes int) *scanPage {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes += bytes
	page := &scanPage{counted: &countedPage{pages: p, bytes: bytes}}
	runtime.AddCleanup(page, (*countedPage).sent, page.counted)
	return page
}

// awaitSent waits until the pages are sent.
func (p *scanPages) awaitSent(ctx context.Context) error {
	p.mu.Lock()
	if p.bytes == 0 {
		p.mu.Unlock()
		return nil
	}
	empty := make(chan struct{})
	p.empty = empty
	p.mu.Unlock()
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// end ends the scan of a connection, which was admitted with so many bytes.
func (p *scanPages) end(conn *connection, room int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bytes == 0 {
		p.admission.leave(conn, shareScans, room)
		return
	}
	p.ended, p.room, p.conn = true, min(room, max(p.bytes, p.admission.scanBytesMin())), conn
	p.admission.shrink(conn, shareScans, room, p.room)
	conn.keepPages(p.admission, p.room)
}

func (p *scanPages) sent(bytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bytes -= bytes; p.bytes > 0 {
		return
	}
	if p.ended {
		p.conn.leavePages(p.admission, p.room)
	}
	if p.empty != nil {
		close(p.empty)
		p.empty = nil
	}
}

// scanPage is a page until it is sent. Like memoryCharge it is the pool of the buffer into which the page is encoded.
type scanPage struct{ counted *countedPage }

// countedPage is the part of a scanPage that outlives it, for the cleanup.
type countedPage struct {
	pages *scanPages
	bytes int
	over  atomic.Bool
}

func (c *countedPage) sent() {
	if !c.over.Swap(true) {
		c.pages.sent(c.bytes)
	}
}

// Get implements mem.BufferPool.
func (p *scanPage) Get(length int) *[]byte { return pb.Buffers.Get(length) }

// Put implements mem.BufferPool.
func (p *scanPage) Put(b *[]byte) {
	pb.Buffers.Put(b)
	p.counted.sent()
}

// pageMessage is a page whose encoding is counted.
type pageMessage struct {
	encoder
	page *scanPage
}

// BufferPool is the pool from which the codec takes the page's buffer.
func (m *pageMessage) BufferPool() mem.BufferPool { return m.page }

// Sent implements transport.Counted.
func (m *pageMessage) Sent() { m.page.counted.sent() }

// sendCounted sends the page, which counts until the transport has sent it. It is copied into a buffer of the transport when those before it are sent,
// however much a transport takes.
func (sc *scan) sendCounted(stream grpc.ServerStreamingServer[pb.ScanResponse]) error {
	if sc.later {
		if err := transport.AwaitSent(stream.Context(), 0); err != nil {
			return err
		}
	}
	if sc.size < pageCountedMin && sc.only || sc.access.conn == nil {
		return stream.SendMsg(&sc.page)
	}
	if sc.server.config.Transport == config.TransportGRPC {
		if err := sc.pages.awaitSent(sc.snapshot.ctx); err != nil {
			return err
		}
	}
	page := sc.pages.add(pb.BufferBytes(sc.size + len(sc.last)))
	err := stream.SendMsg(&pageMessage{encoder: &sc.page, page: page})
	if err != nil {
		page.counted.sent()
	}
	return err
}

// keepPages counts the room of a scan that has ended before its pages were sent.
func (c *connection) keepPages(a *admission, room int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		a.leave(c, shareScans, room)
		return
	}
	if c.pages == nil {
		c.pages = make(map[int]int)
	}
	c.pages[room]++
	a.words[shareScans].large.handOver(c, int64(room))
}

// leavePages gives that back, unless the connection has ended.
func (c *connection) leavePages(a *admission, room int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	if c.pages[room]--; c.pages[room] == 0 {
		delete(c.pages, room)
	}
	a.leave(c, shareScans, room)
}
