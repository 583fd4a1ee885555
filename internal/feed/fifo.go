package feed

// fifo is a list from which the first element is removed, without moving the others each time.
type fifo[T any] struct {
	list []T
	head int
}

func (f *fifo[T]) len() int { return len(f.list) - f.head }

// all are the elements, the first one first, valid until the next call.
func (f *fifo[T]) all() []T { return f.list[f.head:] }

func (f *fifo[T]) push(e T) {
	if f.head > 64 && f.head > len(f.list)/2 {
		n := copy(f.list, f.list[f.head:])
		clear(f.list[n:])
		f.list, f.head = f.list[:n], 0
	}
	f.list = append(f.list, e)
}

// pop removes the first element. There must be one.
func (f *fifo[T]) pop() T {
	var none T
	e := f.list[f.head]
	f.list[f.head] = none
	if f.head++; f.head == len(f.list) {
		f.list, f.head = f.list[:0], 0
	}
	return e
}
