package com.example.jaxspec

import android.content.Context
import android.graphics.Canvas
import android.graphics.DashPathEffect
import android.graphics.Paint
import android.view.View

/** Draws a step's tree: solid lines lead to accepted tokens, dashed lines to dropped ones. */
class TreeView(context: Context) : View(context) {
    private val unit = resources.displayMetrics.density
    private val words = Paint(Paint.ANTI_ALIAS_FLAG).apply { textSize = 12 * unit }
    private val lines = Paint(Paint.ANTI_ALIAS_FLAG).apply { strokeWidth = 2 * unit }
    private var parents = IntArray(0)
    private var names: List<String> = emptyList()
    private var path: Set<Int> = emptySet()
    private val columns = ArrayList<Int>()
    private val rows = ArrayList<Int>()

    /** Shows a tree; without `parents`, nothing. `path` holds the accepted nodes, the root included. */
    fun show(parents: IntArray, names: List<String>, path: Set<Int>) {
        this.parents = parents
        this.names = names
        this.path = path
        columns.clear()
        rows.clear()
        val leaves = ArrayList<Int>() // by column: rows in use
        for (node in parents.indices) {
            val column = if (node == 0) 0 else columns[parents[node]] + 1
            while (leaves.size <= column) leaves.add(0)
            val row = if (node == 0) 0 else maxOf(leaves[column], rows[parents[node]])
            columns.add(column)
            rows.add(row)
            leaves[column] = row + 1
        }
        requestLayout()
        invalidate()
    }

    override fun onMeasure(widthMeasureSpec: Int, heightMeasureSpec: Int) {
        val width = ((1 + (columns.maxOrNull() ?: 0)) * 90 * unit).toInt()
        val height = ((1 + (rows.maxOrNull() ?: 0)) * 32 * unit).toInt()
        setMeasuredDimension(width, height)
    }

    override fun onDraw(canvas: Canvas) {
        for (node in parents.indices) {
            val accepted = node in path
            words.color = if (accepted) ACCEPTED else DROPPED
            words.isFakeBoldText = accepted
            canvas.drawText(names.getOrElse(node) { "" }.take(8), columns[node] * 90 * unit + 4 * unit, rows[node] * 32 * unit + 20 * unit, words)
            if (node == 0) continue
            lines.color = words.color
            lines.pathEffect = if (accepted) null else DashPathEffect(floatArrayOf(4 * unit, 4 * unit), 0f)
            val parent = parents[node]
            canvas.drawLine(columns[parent] * 90 * unit + 64 * unit, rows[parent] * 32 * unit + 16 * unit, columns[node] * 90 * unit, rows[node] * 32 * unit + 16 * unit, lines)
        }
    }

    companion object {
        const val ACCEPTED = 0xFF0B5CAD.toInt()
        const val DROPPED = 0xFF7C879A.toInt()
    }
}
