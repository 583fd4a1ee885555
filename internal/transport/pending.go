package transport

// pending is what the windows of a stream do not allow it to send yet: parts in the order in which they are sent. A message that counts, or whose buffer is
// lent, is a part by itself, so that its bytes are given back when it has been sent, whatever follows it. Small messages share parts.
type pending struct {
	bytes int
	small int // bytes of them that nothing releases
	first part
	later []part // after the first
}

// part is what has not been sent of a message, or of several.
type part struct {
	rest    []byte
	release func() // once nothing refers to the bytes any more; nil: more may be appended
}

// push adds a message. The array of b belongs to the part until release is called, unless that is nil.
func (p *pending) push(b []byte, release func()) {
	last := part{rest: b, release: release}
	if p.bytes == 0 {
		p.first = last
	} else {
		p.later = append(p.later, last)
	}
	p.bytes += len(b)
	if release == nil {
		p.small += len(b)
	}
}

// extend adds so many bytes, and returns them to be written.
func (p *pending) extend(n int) []byte {
	last := &p.first
	if len(p.later) > 0 {
		last = &p.later[len(p.later)-1]
	}
	if p.bytes == 0 || last.release != nil {
		b := make([]byte, n)
		p.push(b, nil)
		return b
	}
	from := len(last.rest)
	last.rest = grow(last.rest, n)
	p.bytes += n
	p.small += n
	return last.rest[from:]
}

// appendTo moves the next n bytes to the end of b.
func (p *pending) appendTo(b []byte, n int) []byte {
	p.bytes -= n
	for n > 0 {
		first := &p.first
		k := min(n, len(first.rest))
		b = append(b, first.rest[:k]...)
		first.rest = first.rest[k:]
		if first.release == nil {
			p.small -= k
		}
		if n -= k; len(first.rest) == 0 {
			p.shift()
		}
	}
	return b
}

// shift gives the first part back.
func (p *pending) shift() {
	release := p.first.release
	p.first = part{}
	if len(p.later) > 0 {
		p.first, p.later[0] = p.later[0], part{}
		if p.later = p.later[1:]; len(p.later) == 0 {
			p.later = nil
		}
	}
	if release != nil {
		release()
	}
}

// drop gives everything back.
func (p *pending) drop() {
	p.small = 0
	for p.bytes > 0 {
		p.bytes -= len(p.first.rest)
		p.shift()
	}
}
